// How much a row counts by its norm, and the sum of what rows then are, for the clipping of DP-SGD:
// two functions, of which each reads all gradients once.
//
// A row is measured and added up by the same operations whatever is in it, without a branch: how
// long they take says nothing of it but what the processor lets out about very small numbers.
// setup.py has this file compiled for several generations of processors, of which
// privssl/ops/dispatch.py takes the one that fits.

#include <bit>
#include <cmath>

#include "vectors.hpp"

extern "C" {

// Gradients of one parameter, as privssl/ops/clipping.py has it: row by row, or the products of
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
constexpr Index HALF = LANES / 2;
typedef Vector<HALF> H;
#if defined(__AVX512F__)
typedef __m512d Wide;
inline Wide widened(H v) { return _mm512_cvtps_pd((__m256)v); }
#else
typedef __m256d Wide;
inline Wide widened(H v) { return _mm256_cvtps_pd((__m128)v); }
#endif
inline Wide widened(const float* from) { return widened(load<HALF>(from)); }
constexpr Index SUMS = 4;       // vectors in registers
constexpr Index BLOCK = 2048;   // numbers of a row
constexpr Index HIGH = 4, WIDE = 2;  // of a tile of products: numbers, and vectors of others

// Zeros in place of what is no number or infinite: 0 times it would be no number.
inline Wide finite(H v) {
  const auto bits = (Lanes<HALF>::Whole)v;
  return widened((H)(bits & ((bits & 0x7f800000) != 0x7f800000)));
}
inline H load_half(const float* from, Index count) {
  H v{};
  for (Index a = 0; a < count; a++) v[a] = from[a];
  return v;
}
inline Wide load_wide(const double* from) {
  Wide v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store_wide(double* to, Wide v, Index count = HALF) {
  if (count >= HALF) {
    std::memcpy(to, &v, sizeof v);
    return;
  }
  for (Index a = 0; a < count; a++) to[a] = v[a];
}

// Adds so many rows to the sum of those before, if there are any.
template <Index ROWS>
void add_rows(Index numbers, Index next, const float* each, const double* factors, bool begin,
              double* total) {
  Index n = 0;
  for (; n + HALF <= numbers; n += HALF) {
    Wide sum = begin ? Wide{} : load_wide(total + n);
#pragma GCC unroll 4
    for (Index r = 0; r < ROWS; r++) sum += factors[r] * finite(load<HALF>(each + r * next + n));
    store_wide(total + n, sum);
  }
  if (n == numbers) return;
  Wide sum{};
  if (!begin)
    for (Index a = 0; a < numbers - n; a++) sum[a] = total[n + a];
  for (Index r = 0; r < ROWS; r++)
    sum += factors[r] * finite(load_half(each + r * next + n, numbers - n));
  store_wide(total + n, sum, numbers - n);
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
void total_of_rows(Index rows, Index numbers, Index next, const float* each, const double* factors,
                   double* total) {
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
void tile_of(Index rows, const double* left, const double* right, Index numbers, Index others,
             Index line, double* total) {
  Wide sums[HIGH][WIDE] = {};
  for (Index r = 0; r < rows; r++, left += HIGH, right += WIDE * HALF)
#pragma GCC unroll 4
    for (Index i = 0; i < HIGH; i++)
#pragma GCC unroll 2
      for (Index v = 0; v < WIDE; v++) sums[i][v] += left[i] * load_wide(right + v * HALF);
#pragma GCC unroll 4
  for (Index i = 0; i < HIGH; i++)
#pragma GCC unroll 2
    for (Index v = 0; v < WIDE; v++)
      if (i < numbers && v * HALF < others)
        store_wide(total + i * line + v * HALF, sums[i][v], others - v * HALF);
}

// Rows that are products: total (numbers, others).
void total_of_products(Index rows, const Gradients& of, const double* factors, double* total) {
  const Index high = (of.numbers + HIGH - 1) / HIGH * HIGH, wide = WIDE * HALF;
  Room<double> line(high), left(rows * high), right(rows * wide);  // as tiles read them
  for (Index r = 0; r < rows; r++) {
    add_rows<1>(of.numbers, 0, of.each + r * of.next, factors + r, true, line);
    for (Index n = 0; n < high; n += HIGH)
      std::copy(line + n, line + n + HIGH, left + n * rows + r * HIGH);
  }
  const double one = 1;
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

int clipping_version() { return 2; }

// factors (rows): 1 or what makes a row so long as clip_norm; 0 for a row that is not drawn, and for
// one with a number that is none or a norm, of a factor too, whose square is beyond float32. Squares are added up in
// float64: a row of a million numbers loses no digits, and one of very small ones is not taken for 0.
// Factors are float64 as well: a row weighs the clip norm to the last bits of that.
// norms (rows) are those of parameters that are not here, or nothing.
void clipping_factors(int64_t rows, int64_t parameters, const Gradients* of, const double* norms,
                      const uint8_t* drawn, double clip_norm, double* factors) {
  for (Index r = 0; r < rows; r++) {
    double sum = norms ? norms[r] * norms[r] : 0;
    uint32_t keep = drawn[r] != 0;
    for (const Gradients *one = of, *end = of + parameters; one < end; one++) {
      const double own = squares(one->each + r * one->next, one->numbers);
      const double more = one->other ? squares(one->other + r * one->next_other, one->others) : 1;
      keep &= is_finite(float(own)) & is_finite(float(more));
      sum += own * more;
    }
    keep &= is_finite(float(sum));
    const double factor = std::min(clip_norm / (std::sqrt(sum) + 1e-6), 1.0);
    factors[r] = std::bit_cast<double>(std::bit_cast<uint64_t>(factor) & -uint64_t(keep));
  }
}

// totals (all numbers of a row, one parameter behind the other): the sum over rows of factor times
// row, of its finite numbers, in float64.
void clipping_totals(int64_t rows, int64_t parameters, const Gradients* of, const double* factors,
                     double* totals) {
  for (const Gradients* end = of + parameters; of < end; of++) {
    if (of->other)
      total_of_products(rows, *of, factors, totals);
    else
      total_of_rows(rows, of->numbers, of->next, of->each, factors, totals);
    totals += of->numbers * (of->other ? of->others : 1);
  }
}

}  // extern "C"
