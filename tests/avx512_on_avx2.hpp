// Instructions of AVX-512 that privssl/csrc name, in plain loops, for a compiler that makes code
// for AVX2: see avx512_on_avx2.py. An instruction that is missing here does not compile there.

#pragma once

#include <immintrin.h>

#include <cstdint>

#define __AVX512F__ 1
#define __AVX512BW__ 1

extern "C" __attribute__((used)) inline int as_for_avx512() { return 1; }  // so that it can be seen

namespace plain {
using F = float __attribute__((vector_size(64)));
using I = int32_t __attribute__((vector_size(64)));
using B = int8_t __attribute__((vector_size(64)));
using D = double __attribute__((vector_size(64)));

inline __m512 permutexvar_ps(__m512i at, __m512 from) {
  F r;
  for (int a = 0; a < 16; a++) r[a] = ((F)from)[((I)at)[a] & 15];
  return (__m512)r;
}
inline __m512i permutexvar_epi32(__m512i at, __m512i from) {
  I r;
  for (int a = 0; a < 16; a++) r[a] = ((I)from)[((I)at)[a] & 15];
  return (__m512i)r;
}
inline __m512i cvtepu8_epi32(__m128i from) {
  uint8_t bytes[16];
  _mm_storeu_si128((__m128i*)bytes, from);
  I r;
  for (int a = 0; a < 16; a++) r[a] = bytes[a];
  return (__m512i)r;
}
inline __m128i cvtepi32_epi8(__m512i from) {
  uint8_t bytes[16];
  for (int a = 0; a < 16; a++) bytes[a] = uint8_t(((I)from)[a]);
  return _mm_loadu_si128((const __m128i*)bytes);
}
inline __m512d cvtps_pd(__m256 from) {
  D r;
  for (int a = 0; a < 8; a++) r[a] = from[a];
  return (__m512d)r;
}
inline __m512 castps256_ps512(__m256 from) {
  F r{};
  for (int a = 0; a < 8; a++) r[a] = from[a];
  return (__m512)r;
}
inline __m512 insertf32x8(__m512 into, __m256 from, int upper) {
  for (int a = 0; a < 8; a++) into[8 * upper + a] = from[a];
  return into;
}
inline __m512 loadu_ps(const float* from) {
  F r;
  for (int a = 0; a < 16; a++) r[a] = from[a];
  return (__m512)r;
}
inline __m512 setzero_ps() { return (__m512)F{}; }
inline uint16_t unequal(__m512 a, __m512 b) {
  uint16_t r = 0;
  for (int k = 0; k < 16; k++) r |= uint16_t(!(a[k] == b[k])) << k;
  return r;
}
inline __m512i maskz_loadu_epi8(uint64_t mask, const void* from) {
  B r{};
  for (int a = 0; a < 64; a++)
    if (mask >> a & 1) r[a] = static_cast<const int8_t*>(from)[a];
  return (__m512i)r;
}
inline __m512i set1_epi8(int value) { return (__m512i)(B{} + int8_t(value)); }
inline uint64_t cmpeq_epi8_mask(__m512i a, __m512i b) {
  uint64_t r = 0;
  for (int k = 0; k < 64; k++) r |= uint64_t(((B)a)[k] == ((B)b)[k]) << k;
  return r;
}
}  // namespace plain

#define _mm512_permutexvar_ps plain::permutexvar_ps
#define _mm512_permutexvar_epi32 plain::permutexvar_epi32
#define _mm512_cvtepu8_epi32 plain::cvtepu8_epi32
#define _mm512_cvtepi32_epi8 plain::cvtepi32_epi8
#define _mm512_cvtps_pd plain::cvtps_pd
#define _mm512_castps256_ps512 plain::castps256_ps512
#define _mm512_insertf32x8 plain::insertf32x8
#define _mm512_loadu_ps plain::loadu_ps
#define _mm512_setzero_ps plain::setzero_ps
#define _mm512_cmp_ps_mask(a, b, how) plain::unequal(a, b)
#define _mm512_maskz_loadu_epi8 plain::maskz_loadu_epi8
#define _mm512_set1_epi8 plain::set1_epi8
#define _mm512_cmpeq_epi8_mask plain::cmpeq_epi8_mask
