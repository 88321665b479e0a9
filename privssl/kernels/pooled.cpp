// A convolution, the largest of every two by two places of it, group norm, rectifier: as one, of one
// row after the other, so that what lies between them stays in the processor's caches.
//
// Forward, the sums of a tile of places are held in registers, pooled there and written once; or, of
// kernels of three by three, the four places that are pooled are one tile of Winograd's.
// Backward, pooling has sent three of four gradients nowhere: the gradients of weights and of
// inputs are sums over pooled places alone, a quarter of the multiplications of a convolution's own
// backward pass, which is done with a gradient that is mostly zeros. What rectifiers made zero is
// left out as well.
//
// Arrays are float32, rows x height x width x channels ("channels last"), kernels x height x width x
// channels. setup.py has this file compiled for several generations of processors, of which
// privssl/kernels/__init__.py takes the one that fits; no other thread is used. What is written
// here has as many rows as inputs and outputs, and each row is computed by itself.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

using Index = std::ptrdiff_t;

// Vectors of numbers ---------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr Index LANES = 16, HELD = 28;  // numbers in a vector; vectors that stay in registers
#else
constexpr Index LANES = 8, HELD = 12;
#endif
constexpr Index COLUMNS = HELD / 4 * 2;  // of a tile of two lines, even
constexpr Index LINE = 64;               // bytes of a cache
constexpr Index NEAR = 1 << 14;          // numbers that one of the inner caches holds

template <Index L>
struct Lanes {
  typedef float Numbers __attribute__((vector_size(4 * L), aligned(4), may_alias));
  typedef int32_t Whole __attribute__((vector_size(4 * L), aligned(4), may_alias));
  typedef uint8_t Bytes __attribute__((vector_size(L), aligned(1), may_alias));
};
template <Index L>
using Vector = typename Lanes<L>::Numbers;
using V = Vector<LANES>;

template <Index L = LANES>
inline Vector<L> load(const float* from) {
  return *reinterpret_cast<const Vector<L>*>(from);
}
template <Index L>
inline void store(float* to, Vector<L> v) {
  *reinterpret_cast<Vector<L>*>(to) = v;
}
inline void store(float* to, V v) { store<LANES>(to, v); }

inline V load_some(const float* from, Index count) {
  if (count >= LANES) return load(from);
  V v{};
  for (Index a = 0; a < count; a++) v[a] = from[a];
  return v;
}
template <Index L>
inline void store_some(float* to, Vector<L> v, Index count) {
  if (count >= L) return store<L>(to, v);
  for (Index a = 0; a < count; a++) to[a] = v[a];
}

template <Index L>
inline void add_or_put(float* to, Vector<L> v, Index count, bool add) {
  if (count >= L)
    store<L>(to, add ? load<L>(to) + v : v);
  else
    for (Index a = 0; a < count; a++) to[a] = add ? to[a] + v[a] : v[a];
}

// Memory that begins with a line of the cache, filled with zeros.
template <class T>
class Room {
 public:
  explicit Room(size_t count) : size_((count * sizeof(T) + LINE - 1) / LINE * LINE) {
    held_.reset(static_cast<T*>(std::aligned_alloc(LINE, std::max<size_t>(size_, LINE))));
    if (!held_) std::abort();
    clear();
  }
  void clear() { std::memset(held_.get(), 0, size_); }
  operator T*() { return held_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  size_t size_;
  std::unique_ptr<T, Free> held_;
};

}  // namespace

// What is asked for: the layers, and how much of them. As in privssl/kernels/__init__.py.
struct Layers {
  int64_t rows, height, width, channels;    // of the inputs
  int64_t kernels, high, wide, down, right;  // of the convolution; zeros around the inputs
  int64_t groups;                           // of the norm; 0: there is none
  int64_t rectified;                        // 1: by a rectifier, 0: not
  int64_t together;                         // rows whose gradients are one sum, in order
  double eps;                               // of the norm
};

namespace {

struct Sizes {
  Index C, K, Kp;            // channels, kernels, these filled up to whole vectors
  Index Hp, Wp;              // inputs with the zeros around them
  Index high, wide, taps;    // of a kernel
  Index ph, pw, M;           // pooled places
  Index down, right, height, width, line;  // line: numbers in one of the inputs, without zeros

  explicit Sizes(const Layers& of)
      : C(of.channels), K(of.kernels), Kp((K + LANES - 1) / LANES * LANES),
        Hp(of.height + 2 * of.down), Wp(of.width + 2 * of.right),
        high(of.high), wide(of.wide), taps(high * wide),
        ph((Hp - high + 1) / 2), pw((Wp - wide + 1) / 2), M(ph * pw),
        down(of.down), right(of.right), height(of.height), width(of.width), line(width * C) {}
};

// Forward --------------------------------------------------------------------------------------

// The largest of four vectors of kernels, and which of them it was. The first of equals; and NaN is
// larger than all, as in torch.
inline void pool(const V four[4], float* largest, uint8_t* where) {
  V most = four[0];
  Lanes<LANES>::Whole which{};
#pragma GCC unroll 3
  for (int32_t n = 1; n < 4; n++) {
    const auto more = (four[n] > most) | (four[n] != four[n]);
    most = more ? four[n] : most;
    which = more ? n - Lanes<LANES>::Whole{} : which;
  }
  store(largest, most);
  *reinterpret_cast<Lanes<LANES>::Bytes*>(where) =
      __builtin_convertvector(which, Lanes<LANES>::Bytes);
}

// A convolution as it is written: LANES kernels at two lines of some places at a time.
class Direct {
 public:
  Direct(const Sizes& of, const float* weights, const float* bias)
      : of_(of), weights_(of.Kp * of.C * of.taps), planes_(of.C * of.Hp * of.Wp), bias_(bias) {
    float* to = weights_;  // vectors of kernels, by channel and tap
    for (Index first = 0; first < of.Kp; first += LANES)
      for (Index c = 0; c < of.C; c++)
        for (Index tap = 0; tap < of.taps; tap++, to += LANES)
          for (Index a = 0; a < LANES && first + a < of.K; a++)
            to[a] = weights[((first + a) * of.taps + tap) * of.C + c];
  }

  void of_row(const float* x, float* largest, uint8_t* where) {
    for (Index i = 0; i < of_.height; i++)  // channel by channel, with zeros around
      for (Index j = 0; j < of_.width; j++, x += of_.C) {
        float* at = planes_ + (i + of_.down) * of_.Wp + j + of_.right;
        for (Index c = 0; c < of_.C; c++) at[c * of_.Hp * of_.Wp] = x[c];
      }
    for (Index first = 0; first < of_.Kp; first += LANES)
      for (Index i = 0; i < of_.ph; i++)
        for (Index j = 0, columns; j < of_.pw; j += columns / 2) {
          columns = std::min<Index>(2 * (of_.pw - j), COLUMNS);
          const Index to = (i * of_.pw + j) * of_.Kp + first;
          tile_of<COLUMNS>(columns, planes_ + 2 * (i * of_.Wp + j), first, largest + to, where + to);
        }
  }

 private:
  template <Index T>
  void tile_of(Index columns, const float* x, Index first, float* largest, uint8_t* where) {
    if constexpr (T > 0) {
      if (columns == T) return tile<T>(x, first, largest, where);
      tile_of<T - 2>(columns, x, first, largest, where);
    }
  }

  template <Index T>
  void tile(const float* x, Index first, float* largest, uint8_t* where) {
    const float* w = weights_ + first * of_.C * of_.taps;
    V sums[2][T];
#pragma GCC unroll 16
    for (Index t = 0; t < T; t++) sums[0][t] = sums[1][t] = load(bias_ + first);
    for (Index c = 0; c < of_.C; c++, x += of_.Hp * of_.Wp)
      for (Index i = 0; i < of_.high; i++) {
        const float *upper = x + i * of_.Wp, *lower = upper + of_.Wp;
        for (Index j = 0; j < of_.wide; j++, upper++, lower++, w += LANES) {
          const V weights = load(w);
#pragma GCC unroll 16
          for (Index t = 0; t < T; t++) {
            sums[0][t] += weights * upper[t];
            sums[1][t] += weights * lower[t];
          }
        }
      }
#pragma GCC unroll 8
    for (Index t = 0; t < T; t += 2, largest += of_.Kp, where += of_.Kp) {
      const V four[4] = {sums[0][t], sums[0][t + 1], sums[1][t], sums[1][t + 1]};
      pool(four, largest, where);
    }
  }

  const Sizes& of_;
  Room<float> weights_, planes_;
  const float* bias_;
};

// Of kernels of three by three: Winograd's F(2x2, 3x3) (Lavin and Gray, arXiv 1509.09308, section
// 4.1). The four places that are pooled are what it computes at once, by 16 products where there
// were 36:  Y = A' ((G w G') (B' x B)) A.
class Winograd {
 public:
  Winograd(const Sizes& of, const float* weights, const float* bias)
      : of_(of), half_((of.Wp + 1) / 2 + LANES), places_(of.M + LANES + MOST),
        weights_(16 * of.C * of.Kp), planes_(of.C * of.Hp * 2 * half_),
        seen_(16 * of.C * places_), sums_(16 * places_ * LANES), bias_(bias) {
    for (Index k = 0; k < of.K; k++)
      for (Index c = 0; c < of.C; c += LANES) {
        const Index some = std::min(LANES, of.C - c);
        V lines[4][3], w[4];
        for (Index j = 0; j < 3; j++) {
          V g[3];
          for (Index i = 0; i < 3; i++)
            g[i] = load_some(weights + (k * 9 + i * 3 + j) * of.C + c, some);
          filter(g[0], g[1], g[2], w);
          for (Index i = 0; i < 4; i++) lines[i][j] = w[i];
        }
        for (Index i = 0; i < 4; i++) {
          filter(lines[i][0], lines[i][1], lines[i][2], w);
          for (Index j = 0; j < 4; j++) {
            float* to = weights_ + ((k / LANES * 16 + i * 4 + j) * of.C + c) * LANES + k % LANES;
            for (Index a = 0; a < some; a++) to[a * LANES] = w[j][a];
          }
        }
      }
  }

  void of_row(const float* x, float* largest, uint8_t* where) {
    for (Index i = 0; i < of_.height; i++)  // by channel and line; even columns, then odd ones
      for (Index j = 0; j < of_.width; j++, x += of_.C) {
        const Index column = j + of_.right;
        float* at = planes_ + (i + of_.down) * 2 * half_ + column % 2 * half_ + column / 2;
        for (Index c = 0; c < of_.C; c++) at[c * of_.Hp * 2 * half_] = x[c];
      }
    transform();
    for (Index first = 0; first < of_.Kp; first += LANES) {
      const Index parts = (of_.M + MOST - 1) / MOST, each = ((of_.M + parts - 1) / parts + 1) / 2 * 2;
      for (Index m = 0; m < of_.M; m += each) multiply_of<MOST>(each, first, m);
      for (Index m = 0; m < of_.M; m++)
        back(sums_ + m * LANES, load(bias_ + first), largest + m * of_.Kp + first,
             where + m * of_.Kp + first);
    }
  }

 private:
  static constexpr Index MOST = HELD / 4 * 4;  // places whose sums stay in registers

  static void filter(V a, V b, V c, V* to) {
    to[0] = a, to[1] = 0.5f * (a + b + c), to[2] = 0.5f * (a - b + c), to[3] = c;
  }

  // Inputs, by product, channel and place. What is behind the last place of a line the next line
  // writes over.
  void transform() {
    for (Index c = 0; c < of_.C; c++)
      for (Index i = 0; i < of_.ph; i++)
        for (Index j = 0; j < of_.pw; j += LANES) {
          const float* lines = planes_ + (c * of_.Hp + 2 * i) * 2 * half_ + j;
          float* to = seen_ + c * places_ + i * of_.pw + j;
          V columns[4][4];  // even, odd, and the same one further, of the four sums of lines
          for (Index n = 0; n < 4; n++) {
            const float* from = lines + n % 2 * half_ + n / 2;
            V line[4];
            for (Index l = 0; l < 4; l++) line[l] = load(from + l * 2 * half_);
            columns[n][0] = line[0] - line[2], columns[n][1] = line[1] + line[2];
            columns[n][2] = line[2] - line[1], columns[n][3] = line[1] - line[3];
          }
          for (Index l = 0; l < 4; l++) {
            const V all[4] = {columns[0][l] - columns[2][l], columns[1][l] + columns[2][l],
                              columns[2][l] - columns[1][l], columns[1][l] - columns[3][l]};
            for (Index n = 0; n < 4; n++) store(to + (l * 4 + n) * of_.C * places_, all[n]);
          }
        }
  }

  template <Index T>
  void multiply_of(Index places, Index first, Index m) {
    if constexpr (T > 0) {
      if (places == T) return multiply<T>(first, m);
      multiply_of<T - 2>(places, first, m);
    }
  }

  // Each of the 16 products of T places, summed over channels.
  template <Index T>
  void multiply(Index first, Index m) {
    const float *w = weights_ + first * 16 * of_.C, *x = seen_ + m;
    float* to = sums_ + m * LANES;
    for (Index n = 0; n < 16; n++, to += places_ * LANES) {
      V sums[T];
#pragma GCC unroll 28
      for (Index t = 0; t < T; t++) sums[t] = V{};  // "= {}" would write to memory first
      for (Index c = 0; c < of_.C; c++, w += LANES, x += places_) {
        const V weights = load(w);
#pragma GCC unroll 28
        for (Index t = 0; t < T; t++) sums[t] += weights * x[t];
      }
#pragma GCC unroll 28
      for (Index t = 0; t < T; t++) store(to + t * LANES, sums[t]);
    }
  }

  void back(const float* sums, V bias, float* largest, uint8_t* where) {
    V lines[2][4];
    for (Index n = 0; n < 4; n++) {
      V m[4];
      for (Index l = 0; l < 4; l++) m[l] = load(sums + (l * 4 + n) * places_ * LANES);
      lines[0][n] = m[0] + m[1] + m[2], lines[1][n] = m[1] - m[2] - m[3];
    }
    V four[4];
    for (Index l = 0; l < 2; l++) {
      four[2 * l] = lines[l][0] + lines[l][1] + lines[l][2] + bias;
      four[2 * l + 1] = lines[l][1] - lines[l][2] - lines[l][3] + bias;
    }
    pool(four, largest, where);
  }

  const Sizes& of_;
  const Index half_, places_;  // room for them, and for whole vectors of them
  Room<float> weights_, planes_, seen_, sums_;
  const float* bias_;
};

// Mean, and one over the standard deviation, of each group of channels over all places.
void moments(const Sizes& of, const Layers& layers, const float* z, float* sums, float* found) {
  const Index size = of.K / layers.groups;
  const double count = static_cast<double>(size) * of.M;
  Room<float> means(of.Kp);
  for (Index pass = 0; pass < 2; pass++) {
    for (Index k = 0; k < of.Kp; k += LANES) {
      V sum{};
      const V mean = load(means + k);
      for (Index m = 0; m < of.M; m++) {
        const V off = load(z + m * of.Kp + k) - mean;
        sum += pass ? off * off : off;
      }
      store(sums + k, sum);
    }
    for (Index g = 0; g < layers.groups; g++) {
      double sum = 0;
      for (Index k = g * size; k < (g + 1) * size; k++) sum += sums[k];
      const double mean = sum / count;
      found[2 * g + pass] = pass ? 1 / std::sqrt(mean + layers.eps) : mean;
      if (!pass) std::fill(means + g * size, means + (g + 1) * size, found[2 * g]);
    }
  }
}

// Of a row: what its norm subtracts, and multiplies by, for every channel.
struct Norm {
  Room<float> mean, scale, gamma, beta;

  Norm(const Sizes& of, const float* gammas, const float* betas)
      : mean(of.Kp), scale(of.Kp), gamma(of.Kp), beta(of.Kp) {
    if (!gammas) return;
    std::copy(gammas, gammas + of.K, static_cast<float*>(gamma));
    std::copy(betas, betas + of.K, static_cast<float*>(beta));
  }
  void of_row(const Sizes& of, Index groups, const float* found) {
    for (Index k = 0; k < of.K; k++) {
      mean[k] = found[k / (of.K / groups) * 2];
      scale[k] = found[k / (of.K / groups) * 2 + 1];
    }
  }
  V normed(V z, Index k) { return (z - load(mean + k)) * load(scale + k); }
  V output(V z, Index k) { return normed(z, k) * load(gamma + k) + load(beta + k); }
};

template <class Convolution>
void forward(const Layers& layers, const float* x, const float* weights, const float* bias,
             const float* gamma, const float* beta, float* y, float* z, uint8_t* where,
             float* found) {
  const Sizes of(layers);
  Room<float> biases(of.Kp), sums(of.Kp);
  if (bias) std::copy(bias, bias + of.K, static_cast<float*>(biases));
  Convolution convolution(of, weights, biases);
  Norm norm(of, gamma, beta);
  for (int64_t n = 0; n < layers.rows; n++) {
    convolution.of_row(x + n * of.height * of.line, z, where);
    if (layers.groups) {
      moments(of, layers, z, sums, found);
      norm.of_row(of, layers.groups, found);
    }
    for (Index k = 0; k < of.Kp; k += LANES)
      for (Index m = 0; m < of.M; m++) {
        V out = load(z + m * of.Kp + k);
        if (layers.groups) out = norm.output(out, k);
        if (layers.rectified) out = out < 0 ? V{} : out;
        store_some<LANES>(y + m * of.K + k, out, of.K - k);
      }
    y += of.M * of.K, z += of.M * of.Kp, where += of.M * of.Kp, found += 2 * layers.groups;
  }
}

// Backward -------------------------------------------------------------------------------------

// Of one row, what gradients of weights and of inputs are made from. A kernel's taps of one line,
// with their channels, lie side by side in weights and inputs: a ``run``.
struct Row {
  const float* x;        // inputs with zeros around
  float* dx;             // gradients of them, to be added to
  const float* weights;  // (kernels, high, run)
  float* dweights;       // gradients of them
  bool add;              // to what is there; else over it
  const float* g;        // (pooled places, Kp) gradients of the largest
  const uint8_t* where;  // (pooled places, Kp) which of four it was
  const Index* base;  // where in x the first of the four begins, by pooled place
  Index shift[4];    // how far from there each begins
  Index M, K, Kp, high, run, line;
  Index left;        // numbers of the run from here on
  bool sparse;       // whether many gradients are zeros
  Index* at;         // room for the places of others, of a strip,
  float* by;         // and for these
  Index strip;       // pooled places whose inputs stay near
};

template <Index L, Index HIGH, Index R>
inline void nothing(Vector<L> (&sums)[HIGH][R]) {
#pragma GCC unroll 8
  for (Index i = 0; i < HIGH; i++)
#pragma GCC unroll 16
    for (Index r = 0; r < R; r++) sums[i][r] = Vector<L>{};
}

// Sums over pooled places of gradient times what the kernel saw there: HIGH lines of the kernel by
// R vectors of L numbers.
template <Index L, Index HIGH, Index R>
void weight_gradients(const Row& row) {
  for (Index from = 0; from < row.M; from += row.strip) {
    const Index to = std::min(row.M, from + row.strip);
    for (Index k = 0; k < row.K; k++) {
      const float* g = row.g + from * row.Kp + k;
      const uint8_t* where = row.where + from * row.Kp + k;
      Vector<L> sums[HIGH][R];
      nothing<L, HIGH, R>(sums);
      const auto add_what = [&](Index at, float by) {
        const float* seen = row.x + at;
#pragma GCC unroll 8
        for (Index i = 0; i < HIGH; i++, seen += row.line)
#pragma GCC unroll 16
          for (Index r = 0; r < R; r++) sums[i][r] += load<L>(seen + r * L) * by;
      };
      if (row.sparse) {
        Index count = 0;
        for (Index m = from; m < to; m++, g += row.Kp, where += row.Kp) {
          row.at[count] = row.base[m] + row.shift[*where];
          row.by[count] = *g;
          count += *g != 0;
        }
        for (Index n = 0; n < count; n++) add_what(row.at[n], row.by[n]);
      } else {
        for (Index m = from; m < to; m++, g += row.Kp, where += row.Kp)
          add_what(row.base[m] + row.shift[*where], *g);
      }
      const bool add = row.add || from > 0;
      for (Index i = 0; i < HIGH; i++)
        for (Index r = 0; r < R; r++) {
          float* at = row.dweights + (k * row.high + i) * row.run + r * L;
          add_or_put<L>(at, sums[i][r], row.left - r * L, add);
        }
    }
  }
}

// Which of up to 64 kernels had their largest at each of the four places, and a gradient there.
inline void those_at(const uint8_t* where, const float* g, Index count, uint64_t bits[4]) {
#ifdef __AVX512BW__
  const uint64_t in = count < 64 ? (uint64_t{1} << count) - 1 : ~uint64_t{0};
  uint64_t moved = 0;
  for (Index k = 0; k < count; k += 16)
    moved |= uint64_t{_mm512_cmp_ps_mask(_mm512_loadu_ps(g + k), _mm512_setzero_ps(), _CMP_NEQ_UQ)}
             << k;
  const __m512i each = _mm512_maskz_loadu_epi8(in, where);
  for (Index p = 0; p < 4; p++)
    bits[p] = in & moved & _mm512_cmpeq_epi8_mask(each, _mm512_set1_epi8(p));
#else
  for (Index p = 0; p < 4; p++) bits[p] = 0;
  for (Index k = 0; k < count; k++) {
    const uint64_t bit = uint64_t{g[k] != 0} << k;
    for (Index p = 0; p < 4; p++) bits[p] |= where[k] == p ? bit : 0;
  }
#endif
}

// Adds to the gradients of inputs, at each place, the sum over kernels of gradient times weights.
template <Index L, Index HIGH, Index R>
void input_gradients(const Row& row) {
  for (Index m = 0; m < row.M; m++)
    for (Index first = 0; first < row.K; first += 64) {
      const float* g = row.g + m * row.Kp + first;
      uint64_t bits[4];
      those_at(row.where + m * row.Kp + first, g, std::min<Index>(64, row.K - first), bits);
      for (Index p = 0; p < 4; p++) {
        if (!bits[p]) continue;
        Vector<L> sums[HIGH][R];
        nothing<L, HIGH, R>(sums);
        for (; bits[p]; bits[p] &= bits[p] - 1) {
          const int k = __builtin_ctzll(bits[p]);
          const float* weights = row.weights + (first + k) * row.high * row.run;
          const float by = g[k];
#pragma GCC unroll 8
          for (Index i = 0; i < HIGH; i++, weights += row.run)
#pragma GCC unroll 16
            for (Index r = 0; r < R; r++) sums[i][r] += load<L>(weights + r * L) * by;
        }
        float* to = row.dx + row.base[m] + row.shift[p];
#pragma GCC unroll 8
        for (Index i = 0; i < HIGH; i++, to += row.line)
#pragma GCC unroll 16
          for (Index r = 0; r < R; r++)
            add_or_put<L>(to + r * L, sums[i][r], row.left - r * L, true);
      }
    }
}

struct OfWeights {
  static bool whole(const Row&) { return true; }
  template <Index L, Index HIGH, Index R>
  static void run(const Row& row) { weight_gradients<L, HIGH, R>(row); }
};
struct OfInputs {
  // Line by line, where only so the weights that are asked for again and again stay near.
  static bool whole(const Row& row) { return row.K * row.high * row.run <= 1 << 13; }
  template <Index L, Index HIGH, Index R>
  static void run(const Row& row) { input_gradients<L, HIGH, R>(row); }
};

template <class Of, Index L, Index HIGH, Index R>
bool if_it_fits(const Row& row, Index high, Index vectors) {
  if constexpr (R > 0) {
    if (high == HIGH && vectors == R) {
      Of::template run<L, HIGH, R>(row);
      return true;
    }
    return if_it_fits<Of, L, HIGH, R - 1>(row, high, vectors);
  }
  return false;
}

// A kernel's sums all at once where registers hold them (3 or 5 lines); else line by line, in parts.
template <class Of>
void in_registers(const Row& row) {
  constexpr Index HALF = LANES / 2, PART = 12;
  const Index vectors = (row.run + LANES - 1) / LANES;
  if (row.run <= HALF &&
      (if_it_fits<Of, HALF, 3, 1>(row, row.high, 1) || if_it_fits<Of, HALF, 5, 1>(row, row.high, 1)))
    return;
  if (Of::whole(row) && (if_it_fits<Of, LANES, 3, HELD / 3>(row, row.high, vectors) ||
      if_it_fits<Of, LANES, 5, HELD / 5>(row, row.high, vectors)))
    return;
  for (Index i = 0; i < row.high; i++)
    for (Index r = 0; r < vectors; r += PART) {
      Row part = row;
      part.x += i * row.line + r * LANES, part.weights += i * row.run + r * LANES;
      if (row.dx) part.dx += i * row.line + r * LANES;
      if (row.dweights) part.dweights += i * row.run + r * LANES;
      part.left = row.run - r * LANES;
      if_it_fits<Of, LANES, 1, PART>(part, 1, std::min(PART, vectors - r));
    }
}

// From gradients of outputs to those of the largest, and of gamma and beta.
void through_norm(const Sizes& of, const Layers& layers, Norm& norm, const float* z, float* g,
                  float* dgamma, float* dbeta) {
  const Index size = of.K / layers.groups;
  const double count = static_cast<double>(size) * of.M;
  Room<float> plain(of.Kp), along(of.Kp);
  for (Index k = 0; k < of.Kp; k += LANES) {
    V sum{}, product{};
    for (Index m = 0; m < of.M; m++) {
      const V mine = load(g + m * of.Kp + k);
      sum += mine, product += mine * norm.normed(load(z + m * of.Kp + k), k);
    }
    store(plain + k, sum), store(along + k, product);
  }
  if (dgamma)
    for (Index k = 0; k < of.K; k++) dgamma[k] += along[k], dbeta[k] += plain[k];
  for (Index group = 0; group < layers.groups; group++) {
    const Index from = group * size, to = from + size;
    double a = 0, b = 0;
    for (Index k = from; k < to; k++) {
      a += static_cast<double>(norm.gamma[k]) * plain[k];
      b += static_cast<double>(norm.gamma[k]) * along[k];
    }
    std::fill(plain + from, plain + to, a / count), std::fill(along + from, along + to, b / count);
  }
  for (Index k = 0; k < of.Kp; k += LANES)
    for (Index m = 0; m < of.M; m++) {
      float* at = g + m * of.Kp + k;
      const V normed = norm.normed(load(z + m * of.Kp + k), k);
      store(at, load(norm.scale + k) *
                    (load(norm.gamma + k) * load(at) - load(plain + k) - normed * load(along + k)));
    }
}

}  // namespace

// What Python calls ----------------------------------------------------------------------------

extern "C" {

// Of these functions and of ``Layers``, as in privssl/kernels/__init__.py.
int pooled_version() { return 1; }

// kernels filled up to whole vectors: of this many are z and where.
int64_t pooled_filled_up(int64_t kernels) { return (kernels + LANES - 1) / LANES * LANES; }

// y (rows, places, kernels) of x; and for the way back z (rows, places, filled up), what pooling
// left, where (the same) and found (rows, groups, 2), what the norm found.
void pooled_forward(const Layers* layers, const float* x, const float* weights, const float* bias,
                    const float* gamma, const float* beta, float* y, float* z, uint8_t* where,
                    float* found) {
  const bool winograd = layers->high == 3 && layers->wide == 3 && layers->channels > 3;
  (winograd ? forward<Winograd> : forward<Direct>)(*layers, x, weights, bias, gamma, beta, y, z, where,
                                                   found);
}

// Gradients, from dy: of x (or none, where it is null), and for every ``together`` rows of weights,
// bias, gamma and beta (or of none of them).
void pooled_backward(const Layers* layers, const float* dy, const float* x, const float* weights,
                     const float* gamma, const float* beta, const float* z, const uint8_t* where,
                     const float* found, float* dx, float* dweights, float* dbias, float* dgamma,
                     float* dbeta) {
  const Sizes of(*layers);
  const Index run = of.wide * of.C, line = of.Wp * of.C, each = of.taps * of.C;
  Room<float> kept(dx ? of.K * each + LANES : 0);  // vectors end behind what they are of
  Room<float> inputs(of.Hp * line + LANES), dinputs(dx ? of.Hp * line + LANES : 0);
  Room<float> g(of.M * of.Kp);
  const bool sparse = layers->rectified && !layers->groups;  // norms leave no zeros
  Room<Index> base(of.M), places(of.M);
  Room<float> by(of.M);
  Norm norm(of, gamma, beta);
  if (dx) std::copy(weights, weights + of.K * each, static_cast<float*>(kept));
  for (Index m = 0; m < of.M; m++) base[m] = 2 * (m / of.pw * line + m % of.pw * of.C);
  const Index at = of.down * line + of.right * of.C;  // where inputs begin, behind the zeros
  const int64_t sums = (layers->rows + layers->together - 1) / layers->together;
  for (auto [to, size] : {std::pair{dbias, of.K}, {dgamma, of.K}, {dbeta, of.K}})
    if (to) std::fill(to, to + sums * size, 0.f);

  for (int64_t n = 0; n < layers->rows; n++) {
    const int64_t sum = n / layers->together;
    if (layers->groups) norm.of_row(of, layers->groups, found);
    for (Index k = 0; k < of.Kp; k += LANES)
      for (Index m = 0; m < of.M; m++) {
        V mine = load_some(dy + m * of.K + k, of.K - k), out = load(z + m * of.Kp + k);
        if (layers->rectified) {
          if (layers->groups) out = norm.output(out, k);
          mine = out <= 0 ? V{} : mine;
        }
        store(g + m * of.Kp + k, mine);
      }
    if (layers->groups)
      through_norm(of, *layers, norm, z, g, dgamma ? dgamma + sum * of.K : nullptr,
                   dbeta ? dbeta + sum * of.K : nullptr);
    if (dbias)
      for (Index k = 0; k < of.Kp; k += LANES) {
        V total{};
        for (Index m = 0; m < of.M; m++) total += load(g + m * of.Kp + k);
        for (Index a = 0; a < std::min(LANES, of.K - k); a++) dbias[sum * of.K + k + a] += total[a];
      }
    Row row{inputs, dx ? static_cast<float*>(dinputs) : nullptr, kept, nullptr, false, g, where,
            base, {0, of.C, line, line + of.C}, of.M, of.K, of.Kp, of.high, run, line, run,
            sparse, places, by, of.pw * std::max<Index>(1, (NEAR / line - of.high) / 2)};
    if (dweights) {
      for (Index i = 0; i < of.height; i++)
        std::copy(x + i * of.line, x + (i + 1) * of.line, inputs + at + i * line);
      row.dweights = dweights + sum * of.K * each, row.add = n % layers->together != 0;
      in_registers<OfWeights>(row);
    }
    if (dx) {
      dinputs.clear();
      in_registers<OfInputs>(row);
      for (Index i = 0; i < of.height; i++, dx += of.line)
        std::copy(dinputs + at + i * line, dinputs + at + i * line + of.line, dx);
    }
    x += of.height * of.line, dy += of.M * of.K;
    z += of.M * of.Kp, where += of.M * of.Kp, found += 2 * layers->groups;
  }
}

}  // extern "C"
