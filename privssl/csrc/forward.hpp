// The way forward, of one row. The sums of a tile of places are held in registers, pooled there and
// written once; or, of kernels of three by three, the four places that are pooled are one tile of
// Winograd's.

#pragma once

#include "layers.hpp"

namespace {

// A convolution and pooling behind it.
class Convolution {
 public:
  virtual ~Convolution() = default;
  // From (height, width, C) to what ``Left`` has of a row.
  virtual void of_row(const float* x, float* largest, uint8_t* where) = 0;
};

// The largest of four vectors of kernels, and which of them it was. The first of equals; and NaN is
// larger than all, as in torch.
inline void pool(const V four[4], float* largest, uint8_t* where) {
  V most = four[0];
  W which{};
#pragma GCC unroll 3
  for (int32_t n = 1; n < 4; n++) {
    const auto more = (four[n] > most) | (four[n] != four[n]);
    most = more ? four[n] : most;
    which = more ? n - W{} : which;
  }
  store(largest, most);
  store_bytes(where, which);
}

// A convolution as it is written: LANES kernels at two lines of some places at a time.
class Direct final : public Convolution {
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

  void of_row(const float* x, float* largest, uint8_t* where) override {
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
class Winograd final : public Convolution {
 public:
  Winograd(const Sizes& of, const float* weights, const float* bias)
      : of_(of), blocks_((of.C + LANES - 1) / LANES), places_(of.M + MOST),
        weights_(16 * of.C * of.Kp), inputs_(of.Hp * of.Wp * of.C + LANES),
        seen_(16 * blocks_ * places_ * LANES), sums_(16 * places_ * LANES), bias_(bias) {
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

  void of_row(const float* x, float* largest, uint8_t* where) override {
    of_.pad(x, inputs_);
    transform();
    for (Index first = 0; first < of_.Kp; first += LANES) {
      const Index parts = (of_.M + MOST - 1) / MOST, each = (of_.M + parts - 1) / parts;
      for (Index m = 0; m < of_.M; m += each) multiply_of<MOST>(each, first, m);
      for (Index m = 0; m < of_.M; m++)
        back(sums_ + m * LANES, load(bias_ + first), largest + m * of_.Kp + first,
             where + m * of_.Kp + first);
    }
  }

 private:
  static constexpr Index MOST = HELD;  // places whose sums stay in registers

  static void filter(V a, V b, V c, V* to) {
    to[0] = a, to[1] = 0.5f * (a + b + c), to[2] = 0.5f * (a - b + c), to[3] = c;
  }

  // Inputs, by product, block of LANES channels, place, and channel of the block. Behind the last
  // channel are numbers of another place, which nobody reads.
  void transform() {
    for (Index i = 0, m = 0; i < of_.ph; i++)
      for (Index j = 0; j < of_.pw; j++, m++)
        for (Index b = 0; b < blocks_; b++) {
          const float* from = inputs_ + (2 * i * of_.Wp + 2 * j) * of_.C + b * LANES;
          float* to = seen_ + (b * places_ + m) * LANES;
          V columns[4][4];
          for (Index n = 0; n < 4; n++, from += of_.C) {
            V line[4];
            for (Index l = 0; l < 4; l++) line[l] = load(from + l * of_.Wp * of_.C);
            columns[n][0] = line[0] - line[2], columns[n][1] = line[1] + line[2];
            columns[n][2] = line[2] - line[1], columns[n][3] = line[1] - line[3];
          }
          for (Index l = 0; l < 4; l++) {
            const V all[4] = {columns[0][l] - columns[2][l], columns[1][l] + columns[2][l],
                              columns[2][l] - columns[1][l], columns[1][l] - columns[3][l]};
            for (Index n = 0; n < 4; n++) store(to + (l * 4 + n) * blocks_ * places_ * LANES, all[n]);
          }
        }
  }

  template <Index T>
  void multiply_of(Index places, Index first, Index m) {
    if constexpr (T > 0) {
      if (places == T) return multiply<T>(first, m);
      multiply_of<T - 1>(places, first, m);
    }
  }

  // Each of the 16 products of T places, summed over channels.
  template <Index T>
  void multiply(Index first, Index m) {
    const float *w = weights_ + first * 16 * of_.C, *x = seen_ + m * LANES;
    float* to = sums_ + m * LANES;
    for (Index n = 0; n < 16; n++, to += places_ * LANES) {
      V sums[T];
#pragma GCC unroll 28
      for (Index t = 0; t < T; t++) sums[t] = V{};  // "= {}" would write to memory first
      for (Index b = 0; b < blocks_; b++, x += places_ * LANES) {
        const Index some = std::min(LANES, of_.C - b * LANES);
        for (Index c = 0; c < some; c++, w += LANES) {
          const V weights = load(w);
#pragma GCC unroll 28
          for (Index t = 0; t < T; t++) sums[t] += weights * x[t * LANES + c];
        }
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
  const Index blocks_, places_;  // of channels; room for places, and for those of a whole part
  Room<float> weights_, inputs_, seen_, sums_;
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

class Forward {
 public:
  Forward(const Layers& layers, const Parameters& own, const Left& left)
      : layers_(layers), of_(layers), left_(left), biases_(of_.Kp), sums_(of_.Kp),
        norm_(of_, own.gamma, own.beta) {
    if (own.bias) std::copy(own.bias, own.bias + of_.K, static_cast<float*>(biases_));
    if (layers.high == 3 && layers.wide == 3 && layers.channels > 3)
      convolution_ = std::make_unique<Winograd>(of_, own.weights, biases_);
    else
      convolution_ = std::make_unique<Direct>(of_, own.weights, biases_);
  }

  // The output of the next row, which goes to y, or to where ``Left`` has it if that is null.
  const float* of_row(const float* x, float* y) {
    float *z = left_.largest, *found = left_.moments;
    if (!y) y = left_.output;
    convolution_->of_row(x, z, left_.where);
    if (layers_.groups) {
      moments(of_, layers_, z, sums_, found);
      norm_.of_row(of_, layers_.groups, found);
    }
    const bool normed = layers_.groups, rectified = layers_.rectified;
    for (Index k = 0; k < of_.Kp; k += LANES) {
      const Norm::Some norm = norm_.some(k);
      for (Index m = 0; m < of_.M; m++) {
        V out = load(z + m * of_.Kp + k);
        if (normed) out = norm.output(out);
        if (rectified) out = out < 0 ? V{} : out;
        store_some<LANES>(y + m * of_.K + k, out, of_.K - k);
      }
    }
    left_.next(of_, layers_);
    return y;
  }

 private:
  const Layers& layers_;
  const Sizes of_;
  Left left_;  // of the next row
  Room<float> biases_, sums_;
  Norm norm_;
  std::unique_ptr<Convolution> convolution_;
};

}  // namespace
