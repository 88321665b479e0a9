// How much a row counts by its norm, and the sum of what rows then are, for the clipping of DP-SGD:
// two functions, of which each reads all gradients once.
//
// A row is measured and added up by the same operations whatever is in it, without a branch: how
// long they take says nothing of it but what the processor lets out about very small numbers.
// setup.py has this file compiled for several generations of processors, of which
// privssl/kernels/__init__.py takes the one that fits.

#include <bit>
#include <cmath>

#include "vectors.hpp"

extern "C" {

// Gradients of one parameter, as privssl/kernels/clipping.py has it: row by row, or the products of
// two numbers, one of each.
struct Gradients {
  int64_t numbers, next;  // of a row; from the beginning of one to that of the next
  const float* each;
  int64_t others, next_other;
  const float* other;  // or none
};
}

namespace {

// Half as many numbers as a vector has, in float64.
#if defined(__AVX512F__)
typedef __m512d Wide;
inline Wide widened(const float* from) { return _mm512_cvtps_pd(_mm256_loadu_ps(from)); }
#else
typedef __m256d Wide;
inline Wide widened(const float* from) { return _mm256_cvtps_pd(_mm_loadu_ps(from)); }
#endif
constexpr Index HALF = LANES / 2;
constexpr Index SUMS = 4;       // vectors in registers
constexpr Index BLOCK = 2048;   // numbers of a row
constexpr Index HIGH = 4, WIDE = 2;  // of a tile of products: numbers, and vectors of others

// Zeros in place of what is no number or infinite: 0 times it would be no number.
inline V finite(V v) {
  const W bits = (W)v;
  return (V)(bits & ((bits & 0x7f800000) != 0x7f800000));
}

// Adds so many rows to the sum of those before, if there are any.
template <Index ROWS>
void add_rows(Index numbers, Index next, const float* each, const float* factors, bool begin,
              float* total) {
  Index n = 0;
  for (; n + LANES <= numbers; n += LANES) {
    V sum = begin ? V{} : load(total + n);
#pragma GCC unroll 4
    for (Index r = 0; r < ROWS; r++) sum += factors[r] * finite(load(each + r * next + n));
    store(total + n, sum);
  }
  if (n == numbers) return;
  V sum = begin ? V{} : load_some(total + n, numbers - n);
  for (Index r = 0; r < ROWS; r++)
    sum += factors[r] * finite(load_some(each + r * next + n, numbers - n));
  store_some<LANES>(total + n, sum, numbers - n);
}

// 1 or 0, without a branch.
inline uint32_t is_finite(float x) {
  return (std::bit_cast<uint32_t>(x) & 0x7f800000) != 0x7f800000;
}

double squares(const float* each, Index numbers) {
  Wide sums[SUMS] = {};
  Index n = 0;
  for (; n + SUMS * HALF <= numbers; n += SUMS * HALF)
#pragma GCC unroll 4
    for (Index s = 0; s < SUMS; s++) {
      const Wide x = widened(each + n + s * HALF);
      sums[s] += x * x;
    }
  const Wide all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double sum = 0;
  for (; n < numbers; n++) sum += double(each[n]) * each[n];
  for (Index a = 0; a < HALF; a++) sum += all[a];
  return sum;
}

// Rows that are written out.
void total_of_rows(Index rows, Index numbers, Index next, const float* each, const float* factors,
                   float* total) {
  for (Index n = 0; n < numbers; n += BLOCK) {  // the sum stays in the innermost cache
    const Index count = std::min(BLOCK, numbers - n);
    Index r = 0;
    for (; r + 4 <= rows; r += 4)
      add_rows<4>(count, next, each + r * next + n, factors + r, r == 0, total + n);
    for (; r < rows; r++)
      add_rows<1>(count, next, each + r * next + n, factors + r, r == 0, total + n);
  }
}

// The sum over rows of HIGH numbers of each times WIDE vectors of others, (numbers, others) in memory,
// of which so many are there.
void tile_of(Index rows, const float* left, const float* right, Index numbers, Index others,
             Index line, float* total) {
  V sums[HIGH][WIDE] = {};
  for (Index r = 0; r < rows; r++, left += HIGH, right += WIDE * LANES)
#pragma GCC unroll 4
    for (Index i = 0; i < HIGH; i++)
#pragma GCC unroll 2
      for (Index v = 0; v < WIDE; v++) sums[i][v] += left[i] * load(right + v * LANES);
#pragma GCC unroll 4
  for (Index i = 0; i < HIGH; i++)
#pragma GCC unroll 2
    for (Index v = 0; v < WIDE; v++)
      if (i < numbers && v * LANES < others)
        store_some<LANES>(total + i * line + v * LANES, sums[i][v], others - v * LANES);
}

// Rows that are products: total (numbers, others).
void total_of_products(Index rows, const Gradients& of, const float* factors, float* total) {
  const Index high = (of.numbers + HIGH - 1) / HIGH * HIGH, wide = WIDE * LANES;
  Room<float> line(high), left(rows * high), right(rows * wide);  // as tiles read them
  for (Index r = 0; r < rows; r++) {
    add_rows<1>(of.numbers, 0, of.each + r * of.next, factors + r, true, line);
    for (Index n = 0; n < high; n += HIGH)
      std::copy(line + n, line + n + HIGH, left + n * rows + r * HIGH);
  }
  const float one = 1;
  for (Index m = 0; m < of.others; m += wide) {
    const Index count = std::min<Index>(wide, of.others - m);
    for (Index r = 0; r < rows; r++)
      add_rows<1>(count, 0, of.other + r * of.next_other + m, &one, true, right + r * wide);
    for (Index n = 0; n < of.numbers; n += HIGH)
      tile_of(rows, left + n * rows, right, of.numbers - n, count, of.others,
              total + n * of.others + m);
  }
}

}  // namespace

extern "C" {

int clipping_version() { return 1; }

// factors (rows): 1 or what makes a row so long as clip_norm; 0 for a row that is not drawn, and for
// one with a number that is none or a norm, of a factor too, whose square is beyond float32. Squares are added up in
// float64: a row of a million numbers loses no digits, and one of very small ones is not taken for 0.
// norms (rows) are those of parameters that are not here, or nothing.
void clipping_factors(int64_t rows, int64_t parameters, const Gradients* of, const float* norms,
                      const uint8_t* drawn, double clip_norm, float* factors) {
  for (Index r = 0; r < rows; r++) {
    double sum = norms ? double(norms[r]) * norms[r] : 0;
    uint32_t keep = drawn[r] != 0;
    for (const Gradients *one = of, *end = of + parameters; one < end; one++) {
      const double own = squares(one->each + r * one->next, one->numbers);
      const double more = one->other ? squares(one->other + r * one->next_other, one->others) : 1;
      keep &= is_finite(float(own)) & is_finite(float(more));
      sum += own * more;
    }
    keep &= is_finite(float(sum));
    const float factor = std::min(float(clip_norm) / (float(std::sqrt(sum)) + 1e-6f), 1.0f);
    factors[r] = std::bit_cast<float>(std::bit_cast<uint32_t>(factor) & -keep);
  }
}

// totals (all numbers of a row, one parameter behind the other): the sum over rows of factor times
// row, of its finite numbers.
void clipping_totals(int64_t rows, int64_t parameters, const Gradients* of, const float* factors,
                     float* totals) {
  for (const Gradients* end = of + parameters; of < end; of++) {
    if (of->other)
      total_of_products(rows, *of, factors, totals);
    else
      total_of_rows(rows, of->numbers, of->next, of->each, factors, totals);
    totals += of->numbers * (of->other ? of->others : 1);
  }
}

}  // extern "C"
