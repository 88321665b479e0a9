// A weight divided by its largest singular value, as far as power iteration knows it (Miyato et al.
// 2018), and its gradient: what generators/spectral.py has, in one go.
//
// A weight is a matrix (high, wide) whose columns are taps x channels in memory ("channels last");
// torch's vectors have them the other way round. setup.py has this file compiled for several
// generations of processors, of which privssl/ops/dispatch.py takes the one that fits.

#include <cmath>

#include "vectors.hpp"

namespace {

constexpr Index SUMS = 4;  // vectors in registers

float product(const float* a, const float* b, Index count) {
  V sums[SUMS] = {};
  Index n = 0;
  for (; n + SUMS * LANES <= count; n += SUMS * LANES)
#pragma GCC unroll 4
    for (Index s = 0; s < SUMS; s++)
      sums[s] += load(a + n + s * LANES) * load(b + n + s * LANES);
  const V all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float sum = 0;
  for (; n < count; n++) sum += a[n] * b[n];
  for (Index l = 0; l < LANES; l++) sum += all[l];
  return sum;
}

// to = W right
void times(const float* weight, Index high, Index wide, const float* right, float* to) {
  for (Index i = 0; i < high; i++) to[i] = product(weight + i * wide, right, wide);
}

// to = left W
void times_from_left(const float* weight, Index high, Index wide, const float* left, float* to) {
  std::fill(to, to + wide, 0.0f);
  Index i = 0;
  for (; i + 4 <= high; i += 4) {
    const float *w = weight + i * wide, *l = left + i;
    for (Index j = 0; j < wide; j++)
      to[j] += (l[0] * w[j] + l[1] * w[j + wide]) + (l[2] * w[j + 2 * wide] + l[3] * w[j + 3 * wide]);
  }
  for (; i < high; i++)
    for (Index j = 0; j < wide; j++) to[j] += left[i] * weight[i * wide + j];
}

// Returns the product of what the vector was and what it becomes.
float normalise(float* vector, Index count, float eps) {
  const float squares = product(vector, vector, count), norm = std::max(std::sqrt(squares), eps);
  for (Index n = 0; n < count; n++) vector[n] /= norm;
  return squares / norm;
}

}  // namespace

extern "C" {

int spectral_version() { return 1; }

// scaled (high, taps, channels), the weight over its singular value, which is returned; right: the
// right vector as the weight lies in memory. left (high) and v (channels, taps) move, if there are
// iterations.
float spectral_scale(int64_t high, int64_t taps, int64_t channels, const float* weight, float* left,
                     float* v, int64_t iterations, double eps, float* right, float* scaled) {
  const Index wide = taps * channels;
  for (Index t = 0; t < taps; t++)
    for (Index c = 0; c < channels; c++) right[t * channels + c] = v[c * taps + t];
  float value = 0;  // left W right
  for (Index n = 0; n < iterations; n++) {
    times(weight, high, wide, right, left);
    normalise(left, high, float(eps));
    times_from_left(weight, high, wide, left, right);
    value = normalise(right, wide, float(eps));
  }
  if (iterations) {
    for (Index t = 0; t < taps; t++)
      for (Index c = 0; c < channels; c++) v[c * taps + t] = right[t * channels + c];
  } else {
    Room<float> seen(high);
    times(weight, high, wide, right, seen);
    value = product(left, seen, high);
  }
  for (Index n = 0; n < high * wide; n++) scaled[n] = weight[n] / value;
  return value;
}

// back (high, taps, channels), the gradient of the weight, from that of what it was scaled to.
void spectral_back(int64_t high, int64_t wide, const float* gradient, const float* scaled,
                   const float* left, const float* right, float value, float* back) {
  float sum = 0;
  for (Index i = 0; i < high; i++) sum += product(gradient + i * wide, scaled + i * wide, wide);
  for (Index i = 0; i < high; i++)
    for (Index j = 0; j < wide; j++)
      back[i * wide + j] = (gradient[i * wide + j] - sum * left[i] * right[j]) / value;
}

}  // extern "C"
