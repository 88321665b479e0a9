// What is asked for: layers, their parameters, and what a forward pass leaves of them for the way
// back. ``Layers`` is in privssl/ops/dispatch.py as well.

#pragma once

#include <cmath>

#include "vectors.hpp"

extern "C" {

// A convolution, pooling, norm and rectifier.
struct Layers {
  int64_t rows, height, width, channels;     // of the inputs
  int64_t kernels, high, wide, down, right;  // of the convolution; zeros around the inputs
  int64_t groups;                            // of the norm; 0: there is none
  int64_t rectified;                         // 1: by a rectifier, 0: not
  double eps;                                // of the norm
};

// Their parameters. What they do not have is null.
struct Parameters {
  const float *weights, *bias, *gamma, *beta;
};
}

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

  // One row's inputs with zeros around, where there are zeros already; and without them.
  void pad(const float* x, float* to) const {
    to += down * Wp * C + right * C;
    for (Index i = 0; i < height; i++) std::copy(x + i * line, x + (i + 1) * line, to + i * Wp * C);
  }
  void cut(const float* x, float* to) const {
    x += down * Wp * C + right * C;
    for (Index i = 0; i < height; i++, x += Wp * C) to = std::copy(x, x + line, to);
  }
};

// What a forward pass leaves: for each row, what pooling left and which of four it was (pooled
// places, Kp), mean and scale of each group of the norm, and the output (pooled places, K), where it
// is the next layers' input.
struct Left {
  float *largest, *moments, *output;
  uint8_t* where;

  // On to the next row.
  void next(const Sizes& of, const Layers& layers) {
    largest += of.M * of.Kp, where += of.M * of.Kp, moments += 2 * layers.groups;
    if (output) output += of.M * of.K;
  }
};

// Gives each of the layers its part of the room, or only says how many bytes that takes.
inline size_t lay_out(int64_t count, const Layers* layers, char* room, Left* left) {
  size_t end = 0;
  const auto take = [&](size_t bytes) {
    char* at = room ? room + end : nullptr;
    end += (bytes + LINE - 1) / LINE * LINE;
    return at;
  };
  for (int64_t n = 0; n < count; n++) {
    const Sizes of(layers[n]);
    const size_t rows = layers[n].rows, numbers = rows * of.M * of.Kp;
    Left here{};
    here.largest = reinterpret_cast<float*>(take(numbers * sizeof(float)));
    here.moments = reinterpret_cast<float*>(take(rows * layers[n].groups * 2 * sizeof(float)));
    if (n + 1 < count)
      here.output = reinterpret_cast<float*>(take(rows * of.M * of.K * sizeof(float)));
    here.where = reinterpret_cast<uint8_t*>(take(numbers + 32));  // vectors end behind these
    if (left) left[n] = here;
  }
  return end;
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
  // For channels from k on: read once, where the compiler would read them at every place.
  struct Some {
    V mean, scale, gamma, beta;
    V normed(V z) const { return (z - mean) * scale; }
    V output(V z) const { return normed(z) * gamma + beta; }
  };
  Some some(Index k) {
    return {load(mean + k), load(scale + k), load(gamma + k), load(beta + k)};
  }
};

}  // namespace
