// Gradients of a convolution's weights, a sum of its own for each row: over all places that the
// kernel meets, what it saw there times the gradient of what it made.
//
// Arrays are float32, images x height x width x channels ("channels last"). setup.py has this file
// compiled for several generations of processors, of which privssl/ops/dispatch.py takes the
// one that fits; no other thread is used, and each row is computed by itself.

#include <array>
#include <utility>

#include "vectors.hpp"

extern "C" {

// As privssl/ops/per_example_conv.py has it.
struct Correlation {
  int64_t images, together;                       // these of one row follow each other
  int64_t height, width, channels, above, left;   // of what is seen; zeros around it
  int64_t tall, broad, makes;                     // places where it is met; channels there
  int64_t high, wide, down, right;                // of the kernel; its strides
};
}

namespace {

// What a tile of sums is made from.
struct Tile {
  const float* seen;  // at the first place
  const float* met;
  float* sums;
  Index line, step;  // numbers from a place to the one below and to the next, of what is seen
  Index tall, broad, makes;  // makes: numbers from place to place of what is met
  Index lanes, row;  // channels of the sums; numbers from one line of them to the next
  bool add;          // to what is there; else over it
};

// RUN numbers that follow each other in what is seen, by VECTORS of L channels that are met.
template <Index L, Index VECTORS, Index RUN>
void tile_of(const Tile& of) {
  Vector<L> sums[VECTORS][RUN] = {};
  const float* met = of.met;
  for (Index i = 0; i < of.tall; i++) {
    const float* seen = of.seen + i * of.line;
    for (Index j = 0; j < of.broad; j++, seen += of.step, met += of.makes) {
      Vector<L> here[VECTORS];
#pragma GCC unroll 2
      for (Index v = 0; v < VECTORS; v++) here[v] = load<L>(met + v * L);
#pragma GCC unroll 32
      for (Index r = 0; r < RUN; r++) {
        const Vector<L> all = seen[r] - Vector<L>{};
#pragma GCC unroll 2
        for (Index v = 0; v < VECTORS; v++) sums[v][r] += here[v] * all;
      }
    }
  }
#pragma GCC unroll 32
  for (Index r = 0; r < RUN; r++)
#pragma GCC unroll 2
    for (Index v = 0; v < VECTORS; v++)
      add_or_put<L>(of.sums + r * of.row + v * L, sums[v][r], of.lanes - v * L, of.add);
}

using Work = void (*)(const Tile&);
template <Index L, Index VECTORS, Index... RUN>
constexpr auto tiles_of(std::integer_sequence<Index, RUN...>) {
  return std::array<Work, sizeof...(RUN)>{&tile_of<L, VECTORS, RUN + 1>...};
}
constexpr Index FEW = LANES / 2;  // channels
constexpr auto HALF = tiles_of<FEW, 1>(std::make_integer_sequence<Index, HELD>());
constexpr auto ONE = tiles_of<LANES, 1>(std::make_integer_sequence<Index, HELD>());
constexpr auto TWO = tiles_of<LANES, 2>(std::make_integer_sequence<Index, HELD / 2>());

// Lines of numbers to where they are so far apart.
void copy_lines(const float* from, Index lines, Index numbers, float* to, Index next) {
  for (Index i = 0; i < lines; i++, from += numbers, to += next)
    std::copy(from, from + numbers, to);
}

}  // namespace

extern "C" {

int correlation_version() { return 1; }

// sums (images / together, high, wide, channels, makes) of what is seen (images, height, width,
// channels) and met (images, tall, broad, makes).
void correlation_sums(const Correlation* of, const float* seen, const float* met, float* sums) {
  const Index C = of->channels, places = of->tall * of->broad, F = of->makes;
  const Index whole = (F + FEW - 1) / FEW * FEW, run = of->wide * C;
  const Index width = of->width + 2 * of->left, height = of->height + 2 * of->above;
  Room<float> around(height * width * C), filled(places * whole);  // zeros where nothing is copied
  for (int64_t n = 0; n < of->images; n++) {
    const float *x = seen, *g = met;
    if (of->above || of->left) {
      copy_lines(seen, of->height, of->width * C, around + (of->above * width + of->left) * C,
                 width * C);
      x = around;
    }
    if (whole > F) {
      copy_lines(met, places, F, filled, whole);
      g = filled;
    }
    for (Index f = 0, lanes; f < whole; f += lanes) {
      const Index left = whole - f;
      const Work* work = left < LANES ? HALF.data() : left < 2 * LANES ? ONE.data() : TWO.data();
      lanes = left < LANES ? FEW : left < 2 * LANES ? LANES : 2 * LANES;
      const Index longest = lanes > LANES ? HELD / 2 : HELD, parts = (run + longest - 1) / longest;
      for (Index i = 0; i < of->high; i++)
        for (Index p = 0; p < parts; p++) {
          const Index begin = run * p / parts, end = run * (p + 1) / parts;
          work[end - begin - 1]({
              .seen = x + i * width * C + begin, .met = g + f,
              .sums = sums + (i * run + begin) * F + f,
              .line = of->down * width * C, .step = of->right * C,
              .tall = of->tall, .broad = of->broad, .makes = whole,
              .lanes = F - f, .row = F, .add = n % of->together != 0,
          });
        }
    }
    seen += of->height * of->width * C, met += places * F;
    if ((n + 1) % of->together == 0) sums += of->high * run * F;
  }
}

}  // extern "C"
