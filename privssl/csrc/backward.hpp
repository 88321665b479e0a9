// The way back, of one row. Pooling has sent three of four gradients nowhere: those of weights and
// of inputs are sums over pooled places alone, a quarter of the multiplications of a convolution's
// own backward pass, which is done with a gradient that is mostly zeros. What rectifiers made zero
// is left out as well.

#pragma once

#include "layers.hpp"

namespace {

// Of one row, what gradients of weights and of inputs are made from. A kernel's taps of one line,
// with their channels, lie side by side in weights and inputs: a ``run``.
struct Row {
  const float* x;        // inputs with zeros around
  float* dx;             // gradients of them, to be added to
  const float* weights;  // (kernels, high, run); or by vectors of channels
  float* dweights;       // gradients of them
  bool add;              // to what is there; else over it
  const float* g;        // (pooled places, Kp) gradients of the largest
  const uint8_t* where;  // (pooled places, Kp) which of four it was
  const Index* base;  // where in x the first of the four begins, by pooled place
  Index shift[4];    // how far from there each begins
  Index M, K, Kp, high, run, line;
  Index left;        // numbers of the run from here on
  bool sparse;       // whether many gradients are zeros
  const int32_t* spots;  // (pooled places, Kp) where in x the largest begins
  int32_t* at;       // room for those of a strip,
  float* by;         // and for their gradients
  Index strip;       // pooled places whose inputs stay near
};

template <Index L, Index HIGH, Index R>
inline void nothing(Vector<L> (&sums)[HIGH][R]) {
#pragma GCC unroll 8
  for (Index i = 0; i < HIGH; i++)
#pragma GCC unroll 16
    for (Index r = 0; r < R; r++) sums[i][r] = Vector<L>{};
}

// Of a kernel, at a strip of pooled places: where in x what it saw begins, and the gradients.
struct Seen {
  const int32_t* at;
  const float* by;
  Index count, step;  // from one to the next
};

inline Seen seen(const Row& row, Index k, Index from, Index to) {
  const Seen all{row.spots + from * row.Kp + k, row.g + from * row.Kp + k, to - from, row.Kp};
  if (!row.sparse) return all;
  Index count = 0;
  const float* by = all.by;
  for (const int32_t* at = all.at; at < all.at + all.count * row.Kp; at += row.Kp, by += row.Kp) {
    row.at[count] = *at, row.by[count] = *by;
    count += *by != 0;
  }
  return {row.at, row.by, count, 1};
}

// Adds what a kernel saw, times gradients: HIGH lines of it by R vectors.
template <Index L, Index HIGH, Index R>
inline void add_seen(Vector<L> (&sums)[HIGH][R], const float* x, Index line, Index apart, Seen seen) {
  for (; seen.count > 0; seen.count--, seen.at += seen.step, seen.by += seen.step) {
    const float *from = x + *seen.at, g = *seen.by;
#pragma GCC unroll 8
    for (Index i = 0; i < HIGH; i++, from += line)
#pragma GCC unroll 16
      for (Index r = 0; r < R; r++) sums[i][r] += load<L>(from + r * apart) * g;
  }
}

// Sums over pooled places of gradient times what the kernel saw there: HIGH lines of the kernel by
// R vectors of L numbers.
template <Index L, Index HIGH, Index R>
void weight_gradients(const Row& row) {
  for (Index from = 0; from < row.M; from += row.strip)
    for (Index k = 0; k < row.K; k++) {
      Vector<L> sums[HIGH][R];
      nothing<L, HIGH, R>(sums);
      add_seen<L, HIGH, R>(sums, row.x, row.line, L,
                           seen(row, k, from, std::min(row.M, from + row.strip)));
      for (Index i = 0; i < HIGH; i++)
        for (Index r = 0; r < R; r++) {
          float* at = row.dweights + (k * row.high + i) * row.run + r * L;
          add_or_put<L>(at, sums[i][r], row.left - r * L, row.add || from > 0);
        }
    }
}

#ifndef __AVX512F__
// The same of kernels of three by three, a vector of channels at a time: nine sums are what registers
// hold. By itself, or the compiler would run out of registers for addresses.
__attribute__((noinline)) void weight_gradients_of_nine(float* to, Index line, Index C, bool add,
                                                        const float* x, const Seen& seen) {
  V sums[3][3];
  nothing<LANES, 3, 3>(sums);
  add_seen<LANES, 3, 3>(sums, x, line, C, seen);
#pragma GCC unroll 3
  for (Index i = 0; i < 3; i++)
#pragma GCC unroll 3
    for (Index j = 0; j < 3; j++, to += C) add_or_put<LANES>(to, sums[i][j], LANES, add);
}

void weight_gradients_of_three(const Row& row, Index C) {
  for (Index from = 0; from < row.M; from += row.strip)
    for (Index k = 0; k < row.K; k++) {
      const Seen what = seen(row, k, from, std::min(row.M, from + row.strip));
      for (Index c = 0; c < C; c += LANES)
        weight_gradients_of_nine(row.dweights + k * 9 * C + c, row.line, C, row.add || from > 0,
                                 row.x + c, what);
    }
}
#endif

#ifdef __AVX512F__
// The same of inputs of one channel, LANES kernels at once: what each saw at a tap is picked from the
// two lines, of eight numbers, where its largest can be. What is behind kernels has no gradient.
template <Index HIGH, Index WIDE>
void weight_gradients_of_one_channel(const Row& row) {
  static_assert(WIDE < 8);
  const W firsts{0, 1, 8, 9};  // of the four of a pooled place
  for (Index first = 0; first < row.K; first += LANES) {
    V sums[HIGH][WIDE];
    nothing<LANES, HIGH, WIDE>(sums);
    for (Index m = 0; m < row.M; m++) {
      const float* x = row.x + row.base[m];
      const V g = load(row.g + m * row.Kp + first);
      const W at = picked(firsts, widened(row.where + m * row.Kp + first));
#pragma GCC unroll 5
      for (Index i = 0; i < HIGH; i++, x += row.line) {
        const __m512 upper = _mm512_castps256_ps512(_mm256_loadu_ps(x));
        const V two = (V)_mm512_insertf32x8(upper, _mm256_loadu_ps(x + row.line), 1);
#pragma GCC unroll 5
        for (Index j = 0; j < WIDE; j++) sums[i][j] += picked(two, at + int32_t(j)) * g;
      }
    }
    float each[HIGH][WIDE][LANES];
    for (Index i = 0; i < HIGH; i++)
      for (Index j = 0; j < WIDE; j++) store(each[i][j], sums[i][j]);
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
  uint64_t moved = 0;
  for (Index k = 0; k < count; k += 8)
    moved |= uint64_t(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(g + k), _mm256_setzero_ps(),
                                                       _CMP_NEQ_UQ))) << k;
  bits[0] = bits[1] = bits[2] = bits[3] = 0;
  for (Index k = 0; k < count; k += 32) {  // ``Left`` has room behind
    const __m256i each = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(where + k));
    for (Index p = 0; p < 4; p++)
      bits[p] |= uint64_t(uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(each, _mm256_set1_epi8(p)))))
                 << k;
  }
  for (Index p = 0; p < 4; p++) bits[p] &= moved;
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
            add_first<L>(to + r * L, sums[i][r], row.left - r * L);
      }
    }
}

// The same of kernels of three by three, a vector of channels at a time. ``weights``: of the vector's
// channels (kernels, 9, LANES), for those kernels that stay near.
constexpr Index SOME = 512 / LANES;

template <Index SIDE, Index P>
inline void add_where_largest(V (&sums)[SIDE][SIDE], uint64_t bits, const float* weights,
                              const float* g) {
  for (; bits; bits &= bits - 1) {
    const int k = __builtin_ctzll(bits);
    const float* of = weights + k * 9 * LANES;
    const float by = g[k];
#pragma GCC unroll 3
    for (Index i = 0; i < 3; i++)
#pragma GCC unroll 3
      for (Index j = 0; j < 3; j++) sums[i + P / 2][j + P % 2] += load(of + (i * 3 + j) * LANES) * by;
  }
}

template <Index SIDE>
inline void load_square(V (&sums)[SIDE][SIDE], const float* from, Index line, Index C) {
#pragma GCC unroll 4
  for (Index i = 0; i < SIDE; i++)
#pragma GCC unroll 4
    for (Index j = 0; j < SIDE; j++) sums[i][j] = load(from + i * line + j * C);
}

template <Index SIDE>
inline void store_square(const V (&sums)[SIDE][SIDE], float* to, Index line, Index C) {
#pragma GCC unroll 4
  for (Index i = 0; i < SIDE; i++)
#pragma GCC unroll 4
    for (Index j = 0; j < SIDE; j++) store(to + i * line + j * C, sums[i][j]);
}

#ifndef __AVX512F__
// Of one of the four alone, by itself: the compiler would otherwise run out of registers for bits.
__attribute__((noinline)) void input_gradients_of_one(float* to, Index line, Index C, uint64_t bits,
                                                      const float* weights, const float* g) {
  V sums[3][3];
  load_square<3>(sums, to, line, C);
  add_where_largest<3, 0>(sums, bits, weights, g);
  store_square<3>(sums, to, line, C);
}
#endif

void input_gradients_of_three(const Row& row, Index C) {
  for (Index c = 0; c < C; c += LANES)
    for (Index first = 0; first < row.K; first += SOME)
      for (Index m = 0; m < row.M; m++) {
        const float* g = row.g + m * row.Kp + first;
        const float* weights = row.weights + (c / LANES * row.K + first) * 9 * LANES;
        uint64_t bits[4];
        those_at(row.where + m * row.Kp + first, g, std::min(SOME, row.K - first), bits);
        float* to = row.dx + row.base[m] + c;
#ifdef __AVX512F__
        // The four of a pooled place see four by four places of the inputs, whose sums stay in
        // registers.
        V sums[4][4];
        load_square<4>(sums, to, row.line, C);
        add_where_largest<4, 0>(sums, bits[0], weights, g);
        add_where_largest<4, 1>(sums, bits[1], weights, g);
        add_where_largest<4, 2>(sums, bits[2], weights, g);
        add_where_largest<4, 3>(sums, bits[3], weights, g);
        store_square<4>(sums, to, row.line, C);
#else
        for (Index p = 0; p < 4; p++)
          input_gradients_of_one(to + row.shift[p], row.line, C, bits[p], weights, g);
#endif
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

// A kernel's sums all at once where registers hold them (3 or 5 lines); else a few lines, or one line,
// in parts.
template <class Of>
void in_registers(const Row& row) {
  constexpr Index HALF = LANES / 2, PART = 12, LINES = LANES == 8 ? 3 : 1;
  const Index vectors = (row.run + LANES - 1) / LANES;
  if (row.run <= HALF &&
      (if_it_fits<Of, HALF, 3, 1>(row, row.high, 1) || if_it_fits<Of, HALF, 5, 1>(row, row.high, 1)))
    return;
  const bool whole = Of::whole(row);
  if (whole && (if_it_fits<Of, LANES, 3, HELD / 3>(row, row.high, vectors) ||
      if_it_fits<Of, LANES, 5, HELD / 5>(row, row.high, vectors)))
    return;
  const Index most = whole ? std::min(LINES, std::max<Index>(1, HELD / vectors)) : 1;
  for (Index i = 0, lines; i < row.high; i += lines) {
    lines = std::min(most, row.high - i);
    for (Index r = 0; r < vectors; r += PART) {
      Row part = row;
      part.x += i * row.line + r * LANES, part.weights += i * row.run + r * LANES;
      if (row.dx) part.dx += i * row.line + r * LANES;
      if (row.dweights) part.dweights += i * row.run + r * LANES;
      part.left = row.run - r * LANES;
      const Index some = std::min(PART, vectors - r);
      if constexpr (LINES > 1)
        if (if_it_fits<Of, LANES, 3, HELD / 3>(part, lines, some) ||
            if_it_fits<Of, LANES, 2, HELD / 2>(part, lines, some))
          continue;
      if_it_fits<Of, LANES, 1, PART>(part, 1, some);
    }
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
    const Norm::Some mine = norm.some(k);
    for (Index m = 0; m < of.M; m++) {
      const V by = load(g + m * of.Kp + k);
      sum += by, product += by * mine.normed(load(z + m * of.Kp + k));
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
  for (Index k = 0; k < of.Kp; k += LANES) {
    const Norm::Some mine = norm.some(k);
    const V part = load(plain + k), other = load(along + k);
    for (Index m = 0; m < of.M; m++) {
      float* at = g + m * of.Kp + k;
      const V normed = mine.normed(load(z + m * of.Kp + k));
      store(at, mine.scale * (mine.gamma * load(at) - part - normed * other));
    }
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
        spots_(of_.M * of_.Kp), at_(of_.M), norm_(of_, own.gamma, own.beta), of_inputs_(inputs),
        by_vectors_(of_.high == 3 && of_.wide == 3 && of_.C % LANES == 0) {
    if (inputs) {
      // By vectors of channels: (vectors, kernels, taps, LANES).
      const Index vectors = by_vectors_ ? of_.C / LANES : 1, size = of_.C / vectors;
      const float* from = own.weights;
      for (Index n = 0; n < of_.K * of_.taps; n++)
        for (Index v = 0; v < vectors; v++, from += size)
          std::copy(from, from + size, weights_ + (v * of_.K * of_.taps + n) * size);
    }
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
            run_, line_, run_, sparse, spots_, at_, by_,
            of_.pw * std::max<Index>(1, (NEAR / line_ - of_.high) / 2)};
    if (sums.weights) {
      of_.pad(x, inputs_);
      find_spots();
#ifdef __AVX512F__
      if (of_.C == 1 && of_.high == 5 && of_.wide == 5 && !sparse)
        weight_gradients_of_one_channel<5, 5>(row);
#else
      if (by_vectors_)
        weight_gradients_of_three(row, of_.C);
#endif
      else
        in_registers<OfWeights>(row);
    }
    if (of_inputs_) {
      dinputs_.clear();
      if (by_vectors_)
        input_gradients_of_three(row, of_.C);
      else
        in_registers<OfInputs>(row);
      of_.cut(dinputs_, dx_);
    }
    left_.next(of_, layers_);
    return dx_;
  }

 private:
  // From gradients of the output to those behind the rectifier, or of what pooling left.
  void through_rectifier(const float* dy) {
    const bool normed = layers_.groups, rectified = layers_.rectified;
    if (normed) norm_.of_row(of_, layers_.groups, left_.moments);
    const float* largest = left_.largest;
    float* g = g_;
    for (Index k = 0; k < of_.Kp; k += LANES) {
      const Norm::Some norm = norm_.some(k);
      for (Index m = 0; m < of_.M; m++) {
        V mine = load_some(dy + m * of_.K + k, of_.K - k);
        if (rectified) {
          const V z = load(largest + m * of_.Kp + k), out = normed ? norm.output(z) : z;
          mine = out <= 0 ? V{} : mine;
        }
        store(g + m * of_.Kp + k, mine);
      }
    }
  }

  // Where in the inputs the largest are, by pooled place and kernel.
  void find_spots() {
    const int32_t right = of_.C, down = line_;
    const W shifts{0, right, down, down + right};
    for (Index m = 0; m < of_.M; m++)
      for (Index n = m * of_.Kp; n < (m + 1) * of_.Kp; n += LANES) {
        const W spots = int32_t(base_[m]) + picked(shifts, widened(left_.where + n));
        *reinterpret_cast<W*>(spots_ + n) = spots;
      }
  }

  const Layers& layers_;
  const Sizes of_;
  Left left_;  // of the next row
  const Index run_, line_;
  Room<float> weights_, inputs_, dinputs_, dx_, g_, by_;
  Room<Index> base_;
  Room<int32_t> spots_, at_;
  Norm norm_;
  const bool of_inputs_, by_vectors_;
};

}  // namespace
