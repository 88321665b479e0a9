// Vectors of numbers as the processor has them, and memory that suits them.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace {

using Index = std::ptrdiff_t;

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

// Adds the first numbers of a vector, and zeros to what is behind them, which is there.
template <Index L>
inline void add_first(float* to, Vector<L> v, Index count) {
  if (count < L) {
    typename Lanes<L>::Whole place;
    for (Index a = 0; a < L; a++) place[a] = a;
    v = place < int32_t(count) ? v : Vector<L>{};
  }
  store<L>(to, load<L>(to) + v);
}

// What a vector of numbers has at the places that a vector of whole ones says; bytes as whole numbers,
// and whole numbers from 0 to 127 as bytes. (The compiler's own ways take several times as long.)
using W = Lanes<LANES>::Whole;
#if defined(__AVX512F__)
inline V picked(V from, W at) { return (V)_mm512_permutexvar_ps((__m512i)at, (__m512)from); }
inline W picked(W from, W at) { return (W)_mm512_permutexvar_epi32((__m512i)at, (__m512i)from); }
inline W widened(const uint8_t* from) {
  return (W)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store_bytes(uint8_t* to, W v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)v));
}
#else
inline W picked(W from, W at) { return (W)_mm256_permutevar8x32_epi32((__m256i)from, (__m256i)at); }
inline W widened(const uint8_t* from) {
  return (W)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline void store_bytes(uint8_t* to, W v) {
  const __m256i all = (__m256i)v;
  const __m128i two = _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(two, two));
}
#endif

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
