// Normal numbers from random words by Box and Muller's method, as ``secure_noise.box_muller`` says, and
// sums with such noise, as ``noisy_optimizer.add_noise`` does; in one go, several times faster than
// operation by operation.
//
// Logarithm, sine and cosine are fdlibm's polynomials (Sun Microsystems 1993), good to the last bit
// or two of float64, and without a branch: how long they take says nothing of the numbers. It is
// compiled for several generations of processors, of which privssl/ops/dispatch.py takes the one
// that fits.

#include <bit>
#include <cmath>
#include <cstdint>

namespace {

// The number that is nearest to a word: its halves, as they stand behind the digits of 2^84 and 2^52.
inline double nearest(uint64_t word) {
  const double high = std::bit_cast<double>(word >> 32 | 0x4530000000000000) - 0x1.00000001p84;
  return high + std::bit_cast<double>((word & 0xffffffff) | 0x4330000000000000);
}

// Natural logarithm of t in [2^-64, 1]: t = 2^k (1 + f), and log(1 + f) = f - f^2 / 2 + ... by powers
// of s = f / (2 + f).
inline double logarithm(double t) {
  constexpr uint64_t ONE = 0x3ff0000000000000, LEAST = 0x3fe6a09e00000000;  // of 1 + f: sqrt(1/2)
  const uint64_t bits = std::bit_cast<uint64_t>(t) + (ONE - LEAST);
  const double k = std::bit_cast<double>(bits >> 52 | 0x4330000000000000) - (0x1p52 + 1023);
  const double f = std::bit_cast<double>((bits & 0x000fffffffffffff) + LEAST) - 1;
  const double half = 0.5 * f * f, s = f / (2 + f), z = s * s, w = z * z;
  const double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 +
                      w * 1.531383769920937332e-01));
  const double odd = z * (6.666666666666735130e-01 + w * (2.857142874366239149e-01 +
                     w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  const double low = 1.90821492927058770002e-10, high = 6.93147180369123816490e-01;  // log(2)
  return s * (half + even + odd) + k * low - half + f + k * high;
}

// Of x in [-pi/4, pi/4], z = x^2.
inline double sine(double x, double z) {
  const double end = z * z * z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10);
  return x + z * x * (-1.66666666666666324348e-01 + z * (8.33333333332248946124e-03 +
                      z * (-1.98412698298579493134e-04 + z * 2.75573137070700676789e-06) + end));
}
inline double cosine(double z) {
  const double end = z * z * z * (-2.75573143513906633035e-07 + z * (2.08757232129817482790e-09 +
                                  z * -1.13596475577881948265e-11));
  const double r = z * (4.16666666666666019037e-02 + z * (-1.38888888888741095749e-03 +
                   z * 2.48015872894767294178e-05)) + z * end;
  const double half = 0.5 * z, rest = 1 - half;
  return rest + ((1 - rest - half) + z * r);
}

template <bool ROUNDED>
void add(int64_t numbers, const double* __restrict sums, const double* __restrict noise,
         double deviation, double step, float* __restrict noisy) {
  const double inverse = 1 / step;  // exact: a power of two
  for (int64_t n = 0; n < numbers; n++) {
    const double sum = sums[n] + deviation * noise[n];
    noisy[n] = float(ROUNDED ? std::rint(sum * inverse) * step : sum);
  }
}

}  // namespace

extern "C" {

// One parameter's, as privssl/ops/gaussian_noise.py has it.
struct Sums {
  int64_t numbers;
  const double* sums;
  float* noisy;
};

int noise_version() { return 3; }

// Sums with noise, which lies one parameter behind the other, rounded to multiples of the step (a
// power of two), or as they are where it is 0.
void noise_add(int64_t parameters, const Sums* of, const double* noise, double deviation,
               double step) {
  for (const Sums* end = of + parameters; of < end; noise += of->numbers, of++)
    (step > 0 ? add<true> : add<false>)(of->numbers, of->sums, noise, deviation, step, of->noisy);
}

// normal (2 pairs): all first numbers of a pair, then all second ones.
void noise_normal(int64_t pairs, const uint64_t* __restrict radii,
                  const uint64_t* __restrict angles, double* __restrict normal) {
  for (int64_t n = 0; n < pairs; n++) {
    const double tail = (nearest(radii[n]) + 1) * 0x1p-64;  // in (0, 1]
    const double radius = std::sqrt(-2 * logarithm(tail));
    const double turns = nearest(angles[n] >> 11) * 0x1p-51;  // quarters of one, in [0, 4)
    const double whole = std::rint(turns);
    const uint64_t quarters = std::bit_cast<uint64_t>(whole + 0x1p52);  // in the lowest bits
    const double x = (turns - whole) * 1.57079632679489661923, z = x * x;
    const uint64_t sin = std::bit_cast<uint64_t>(sine(x, z));
    const uint64_t cos = std::bit_cast<uint64_t>(cosine(z));
    // By each quarter (cos, sin) becomes (-sin, cos).
    const uint64_t odd = -(quarters & 1), sign = 0x8000000000000000;
    const uint64_t first = (cos & ~odd) | (sin & odd), second = (sin & ~odd) | (cos & odd);
    normal[n] = radius * std::bit_cast<double>(first ^ ((quarters + 1) << 62 & sign));
    normal[pairs + n] = radius * std::bit_cast<double>(second ^ (quarters << 62 & sign));
  }
}

}  // extern "C"
