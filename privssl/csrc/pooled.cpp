// Convolution, the largest of every two by two places of it, group norm, rectifier; and perhaps the
// same once more, and again: as one, of one row after the other, so that what lies between them stays
// in the processor's caches.
//
// Arrays are float32, rows x height x width x channels ("channels last"), kernels x height x width x
// channels. setup.py has this file compiled for several generations of processors, of which
// privssl/ops/dispatch.py takes the one that fits; no other thread is used. What is written
// here has as many rows as inputs and outputs, and each row is computed by itself.

#include <vector>

#include "backward.hpp"
#include "forward.hpp"

extern "C" {

// Of these functions and of ``Layers``, as in privssl/ops/dispatch.py.
int pooled_version() { return 2; }

// Bytes of what a forward pass through ``count`` times the layers leaves for the way back.
int64_t pooled_left(int64_t count, const Layers* layers) {
  return static_cast<int64_t>(lay_out(count, layers, nullptr, nullptr));
}

// y (rows, places, kernels) of x.
void pooled_forward(int64_t count, const Layers* layers, const Parameters* own, const float* x,
                    float* y, char* room) {
  std::vector<Left> left(count);
  lay_out(count, layers, room, left.data());
  std::vector<std::unique_ptr<Forward>> all;
  for (int64_t n = 0; n < count; n++)
    all.push_back(std::make_unique<Forward>(layers[n], own[n], left[n]));
  const Sizes first(layers[0]), last(layers[count - 1]);
  for (int64_t row = 0; row < layers[0].rows; row++, x += first.height * first.line) {
    const float* at = x;
    for (int64_t n = 0; n < count; n++) at = all[n]->of_row(at, n + 1 < count ? nullptr : y);
    y += last.M * last.K;
  }
}

// Gradients, from dy: of x, or none where dx is null; and for every ``together`` rows of parameters,
// or of none where ``sums`` is null. Those of one sum follow each other: weights, bias, gamma and
// beta of the first layers, as far as they have them, then of the next.
void pooled_backward(int64_t count, const Layers* layers, const Parameters* own, const float* x,
                     const float* dy, char* room, int64_t together, float* dx, float* sums) {
  std::vector<Left> left(count);
  lay_out(count, layers, room, left.data());
  std::vector<std::unique_ptr<Backward>> all;
  std::vector<const float*> inputs(count);  // of the next row
  for (int64_t n = 0; n < count; n++) {
    all.push_back(std::make_unique<Backward>(layers[n], own[n], left[n], n > 0 || dx));
    inputs[n] = n ? left[n - 1].output : x;
  }
  const Sizes first(layers[0]), last(layers[count - 1]);
  const Index size = first.height * first.line;
  std::vector<Sums> to(count, Sums{});
  for (int64_t row = 0; row < layers[0].rows; row++, dy += last.M * last.K) {
    const bool begin = row % together == 0;
    if (sums && begin)
      for (int64_t n = 0; n < count; n++) {
        const Sizes of(layers[n]);
        const auto take = [&](bool there, Index numbers) {
          float* at = there ? sums : nullptr;
          if (there) sums += numbers;
          return at;
        };
        to[n].weights = take(true, of.K * of.taps * of.C);
        for (auto [sum, given] : {std::pair{&to[n].bias, own[n].bias},
                                  {&to[n].gamma, own[n].gamma}, {&to[n].beta, own[n].beta}}) {
          *sum = take(given, of.K);
          if (given) std::fill(*sum, *sum + of.K, 0.f);
        }
      }
    const float* gradient = dy;
    for (int64_t n = count; n-- > 0;) {
      gradient = all[n]->of_row(inputs[n], gradient, to[n], begin);
      const Sizes of(layers[n]);
      inputs[n] += of.height * of.line;
    }
    if (dx) dx = std::copy(gradient, gradient + size, dx);
  }
}

}  // extern "C"
