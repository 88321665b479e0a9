// The way back, of one row. Pooling has sent three of four gradients nowhere: those of weights and
// of inputs are sums over pooled places alone, a quarter of the multiplications of a convolution's
// own backward pass, which is done with a gradient that is mostly zeros. What rectifiers made zero
// is left out as well.

#pragma once

#include "layers.hpp"
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

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

#ifdef __AVX512F__
// The same of inputs of one channel, LANES kernels at once: what each saw at a tap is picked from the
// two lines, of eight numbers, where its largest can be. What is behind kernels has no gradient.
template <Index HIGH, Index WIDE>
void weight_gradients_of_one_channel(const Row& row) {
  static_assert(WIDE < 8);
  for (Index first = 0; first < row.K; first += LANES) {
    __m512 sums[HIGH][WIDE];
#pragma GCC unroll 5
    for (Index i = 0; i < HIGH; i++)
#pragma GCC unroll 5
      for (Index j = 0; j < WIDE; j++) sums[i][j] = _mm512_setzero_ps();
    for (Index m = 0; m < row.M; m++) {
      const float* x = row.x + row.base[m];
      const __m512 g = _mm512_loadu_ps(row.g + m * row.Kp + first);
      const void* which = row.where + m * row.Kp + first;
      const __m512i where = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(which)));
      const __m512i below = _mm512_and_si512(where, _mm512_set1_epi32(2));
      const __m512i at = _mm512_add_epi32(where, _mm512_add_epi32(_mm512_slli_epi32(below, 1), below));
#pragma GCC unroll 5
      for (Index i = 0; i < HIGH; i++, x += row.line) {
        const __m512 two = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(x)),
                                              _mm256_loadu_ps(x + row.line), 1);
#pragma GCC unroll 5
        for (Index j = 0; j < WIDE; j++) {
          const __m512i here = _mm512_add_epi32(at, _mm512_set1_epi32(j));
          sums[i][j] = _mm512_fmadd_ps(_mm512_permutexvar_ps(here, two), g, sums[i][j]);
        }
      }
    }
    float each[HIGH][WIDE][LANES];
    for (Index i = 0; i < HIGH; i++)
      for (Index j = 0; j < WIDE; j++) _mm512_storeu_ps(each[i][j], sums[i][j]);
    for (Index k = first; k < std::min(row.K, first + LANES); k++)
      for (Index i = 0; i < HIGH; i++)
        for (Index j = 0; j < WIDE; j++) {
          float& to = row.dweights[(k * HIGH + i) * WIDE + j];
          to = row.add ? to + each[i][j][k - first] : each[i][j][k - first];
        }
  }
}
#endif

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

#ifdef __AVX512F__
// The same of kernels of three by three. The four of a pooled place see four by four places of the
// inputs, whose sums stay in registers, a vector of channels at a time, for those kernels whose
// weights stay near.
constexpr Index SOME = 32;

template <Index P>
inline void add_where_largest(V (&sums)[4][4], uint64_t bits, const float* weights, const float* g,
                              Index C) {
  for (; bits; bits &= bits - 1) {
    const int k = __builtin_ctzll(bits);
    const float* of = weights + k * 9 * C;
    const float by = g[k];
#pragma GCC unroll 3
    for (Index i = 0; i < 3; i++)
#pragma GCC unroll 3
      for (Index j = 0; j < 3; j++) sums[i + P / 2][j + P % 2] += load(of + (i * 3 + j) * C) * by;
  }
}

void input_gradients_of_three(const Row& row, Index C) {
  for (Index c = 0; c < C; c += LANES)
    for (Index first = 0; first < row.K; first += SOME)
      for (Index m = 0; m < row.M; m++) {
        const float *g = row.g + m * row.Kp + first, *weights = row.weights + first * 9 * C + c;
        uint64_t bits[4];
        those_at(row.where + m * row.Kp + first, g, std::min(SOME, row.K - first), bits);
        float* to = row.dx + row.base[m] + c;
        V sums[4][4];
#pragma GCC unroll 4
        for (Index i = 0; i < 4; i++)
#pragma GCC unroll 4
          for (Index j = 0; j < 4; j++) sums[i][j] = load(to + i * row.line + j * C);
        add_where_largest<0>(sums, bits[0], weights, g, C);
        add_where_largest<1>(sums, bits[1], weights, g, C);
        add_where_largest<2>(sums, bits[2], weights, g, C);
        add_where_largest<3>(sums, bits[3], weights, g, C);
#pragma GCC unroll 4
        for (Index i = 0; i < 4; i++)
#pragma GCC unroll 4
          for (Index j = 0; j < 4; j++) store(to + i * row.line + j * C, sums[i][j]);
      }
}
#endif

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

// A row's gradients of parameters, to be added to what is there. What has none is null.
struct Sums {
  float *weights, *bias, *gamma, *beta;
};

class Backward {
 public:
  // ``inputs``: whether gradients of them are asked for.
  Backward(const Layers& layers, const Parameters& own, const Left& left, bool inputs)
      : layers_(layers), of_(layers), left_(left), run_(of_.wide * of_.C), line_(of_.Wp * of_.C),
        weights_(inputs ? of_.K * of_.taps * of_.C + LANES : 0),  // vectors end behind these
        inputs_(of_.Hp * line_ + LANES), dinputs_(inputs ? of_.Hp * line_ + LANES : 0),
        dx_(inputs ? of_.height * of_.line : 0), g_(of_.M * of_.Kp), by_(of_.M), base_(of_.M),
        places_(of_.M), norm_(of_, own.gamma, own.beta), of_inputs_(inputs) {
    if (inputs) std::copy(own.weights, own.weights + of_.K * of_.taps * of_.C, weights_ + 0);
    for (Index m = 0; m < of_.M; m++) base_[m] = 2 * (m / of_.pw * line_ + m % of_.pw * of_.C);
  }

  // Gradients of the next row: of its inputs, if they are asked for, from its output's ``dy``; and
  // of parameters, if they are. ``begin``: weights' are put where they belong, not added.
  const float* of_row(const float* x, const float* dy, const Sums& sums, bool begin) {
    through_rectifier(dy);
    if (layers_.groups)
      through_norm(of_, layers_, norm_, left_.largest, g_, sums.gamma, sums.beta);
    if (sums.bias)
      for (Index k = 0; k < of_.Kp; k += LANES) {
        V total{};
        for (Index m = 0; m < of_.M; m++) total += load(g_ + m * of_.Kp + k);
        for (Index a = 0; a < std::min(LANES, of_.K - k); a++) sums.bias[k + a] += total[a];
      }
    // Norms leave no zeros.
    const bool sparse = layers_.rectified && !layers_.groups;
    Row row{inputs_, of_inputs_ ? dinputs_ + 0 : nullptr, weights_, sums.weights, !begin, g_,
            left_.where, base_, {0, of_.C, line_, line_ + of_.C}, of_.M, of_.K, of_.Kp, of_.high,
            run_, line_, run_, sparse, places_, by_,
            of_.pw * std::max<Index>(1, (NEAR / line_ - of_.high) / 2)};
    if (sums.weights) {
      of_.pad(x, inputs_);
#ifdef __AVX512F__
      if (of_.C == 1 && of_.high == 5 && of_.wide == 5 && !sparse)
        weight_gradients_of_one_channel<5, 5>(row);
      else
#endif
        in_registers<OfWeights>(row);
    }
    if (of_inputs_) {
      dinputs_.clear();
#ifdef __AVX512F__
      if (of_.high == 3 && of_.wide == 3 && of_.C % LANES == 0)
        input_gradients_of_three(row, of_.C);
      else
#endif
        in_registers<OfInputs>(row);
      of_.cut(dinputs_, dx_);
    }
    left_.next(of_, layers_);
    return dx_;
  }

 private:
  // From gradients of the output to those behind the rectifier, or of what pooling left.
  void through_rectifier(const float* dy) {
    if (layers_.groups) norm_.of_row(of_, layers_.groups, left_.moments);
    for (Index k = 0; k < of_.Kp; k += LANES)
      for (Index m = 0; m < of_.M; m++) {
        V mine = load_some(dy + m * of_.K + k, of_.K - k);
        V out = load(left_.largest + m * of_.Kp + k);
        if (layers_.rectified) {
          if (layers_.groups) out = norm_.output(out, k);
          mine = out <= 0 ? V{} : mine;
        }
        store(g_ + m * of_.Kp + k, mine);
      }
  }

  const Layers& layers_;
  const Sizes of_;
  Left left_;  // of the next row
  const Index run_, line_;
  Room<float> weights_, inputs_, dinputs_, dx_, g_, by_;
  Room<Index> base_, places_;
  Norm norm_;
  const bool of_inputs_;
};

}  // namespace
