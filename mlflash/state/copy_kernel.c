/* Copies that go past the caches, and make the checksums of blocks from the very bytes that they copy.

A copy by memcpy reads each line of its target before it writes it, and a checksum reads it once more. Here each byte is
loaded once, stored past the caches, and counted in the checksum while it is in a register. The checksum of a block is
XXH3-64 with seed 0 (Yann Collet, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), as xxhash makes it.

See copy_kernel.py for what may be called. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { LANES = 8, STRIPE = 64, ROUND = 16 /* stripes */, PAST_CACHES = 128 << 10 };
enum { PLAIN, AVX2 };
enum { SKIP, COPY, COPY_AND_CHECK };

typedef struct { uint64_t start, nbytes, source; } Part;
typedef struct { uint64_t target, source, nbytes; } Pair;

/* Counts stripes of 64 bytes in sums, the first of which has a number in its round; copies them, unless to is NULL.
   A variant that stores past the caches needs a target that is a multiple of 64. */
typedef void Stripes(uint64_t sums[LANES], size_t number, uint8_t *to, const uint8_t *from, size_t count);

static const uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F, PRIME64_3 = 0x165667B19E3779F9;
static const uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63, PRIME64_5 = 0x27D4EB2F165667C5, AVALANCHE = 0x165667919E3779F9;

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static uint64_t secret_at(size_t at) {
    uint64_t word;
    memcpy(&word, SECRET + at, sizeof word);
    return word;
}

static void count_stripe(uint64_t sums[LANES], const uint64_t words[LANES], size_t at) {
    for (size_t lane = 0; lane < LANES; lane++) {
        uint64_t key = words[lane] ^ secret_at(at + 8 * lane);
        sums[lane ^ 1] += words[lane];
        sums[lane] += (key & 0xFFFFFFFF) * (key >> 32);
    }
}

static void stripes_plain(uint64_t sums[LANES], size_t number, uint8_t *to, const uint8_t *from, size_t count) {
    for (; count; count--, from += STRIPE) {
        uint64_t words[LANES];
        memcpy(words, from, STRIPE);
        if (to != NULL) {
            memcpy(to, words, STRIPE);
            to += STRIPE;
        }
        count_stripe(sums, words, 8 * number);
        if (++number == ROUND) {
            number = 0;
            for (size_t lane = 0; lane < LANES; lane++)
                sums[lane] = (sums[lane] ^ sums[lane] >> 47 ^ secret_at(128 + 8 * lane)) * PRIME32_1;
        }
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2")))
static void stripes_avx2(uint64_t sums[LANES], size_t number, uint8_t *to, const uint8_t *from, size_t count) {
    const __m256i prime = _mm256_set1_epi64x((int64_t)PRIME32_1);
    __m256i sum[2] = {_mm256_loadu_si256((void *)sums), _mm256_loadu_si256((void *)(sums + 4))};
    for (; count; count--, from += STRIPE) {
        for (int half = 0; half < 2; half++) {
            __m256i words = _mm256_loadu_si256((void *)(from + 32 * half));
            if (to != NULL)
                _mm256_stream_si256((void *)(to + 32 * half), words);
            __m256i key = _mm256_xor_si256(words, _mm256_loadu_si256((void *)(SECRET + 8 * number + 32 * half)));
            __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            sum[half] = _mm256_add_epi64(sum[half], _mm256_add_epi64(product, _mm256_shuffle_epi32(words, 78)));
        }
        if (to != NULL)
            to += STRIPE;
        if (++number == ROUND) {
            number = 0;
            for (int half = 0; half < 2; half++) {
                __m256i mixed = _mm256_xor_si256(sum[half], _mm256_srli_epi64(sum[half], 47));
                mixed = _mm256_xor_si256(mixed, _mm256_loadu_si256((void *)(SECRET + 128 + 32 * half)));
                __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
                sum[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
            }
        }
    }
    _mm256_storeu_si256((void *)sums, sum[0]);
    _mm256_storeu_si256((void *)(sums + 4), sum[1]);
}
#endif

/* The fastest variant that this processor has. */
int mlflash_fastest(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2"))
        return AVX2;
#endif
    return PLAIN;
}

static Stripes *stripes_of(int variant) {
#if defined(__x86_64__)
    if (variant != PLAIN)
        return stripes_avx2;
#endif
    return stripes_plain;
}

static void make_visible(void) {
#if defined(__x86_64__)
    _mm_sfence(); /* stores past the caches come before what another process is told */
#endif
}

typedef struct {
    Stripes *count_stripes;
    uint64_t sums[LANES];
    size_t number, left; /* stripes so far, and those that come before the last one of the block */
    uint8_t last[STRIPE];
} Check;

static Check begin_check(Stripes *count_stripes, size_t nbytes) {
    Check check = {count_stripes, {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5,
                                   PRIME32_1}, 0, nbytes / STRIPE - 1, {0}};
    return check;
}

/* Counts, and copies, whole stripes; the last one of a block is kept, as it is counted in another way. */
static void go_on(Check *check, uint8_t *to, const uint8_t *from, size_t count) {
    size_t now = count < check->left ? count : check->left;
    Stripes *count_stripes = (uintptr_t)to % STRIPE ? stripes_plain : check->count_stripes;
    count_stripes(check->sums, check->number % ROUND, to, from, now);
    check->number += now;
    check->left -= now;
    if (now < count) {
        memcpy(check->last, from + now * STRIPE, STRIPE);
        if (to != NULL)
            memcpy(to + now * STRIPE, check->last, STRIPE);
    }
}

static uint64_t end_check(Check *check, size_t nbytes) {
    uint64_t words[LANES], whole = nbytes * PRIME64_1;
    memcpy(words, check->last, STRIPE);
    count_stripe(check->sums, words, 121);
    for (size_t lane = 0; lane < LANES; lane += 2) {
        unsigned __int128 product = (unsigned __int128)(check->sums[lane] ^ secret_at(11 + 8 * lane))
                                    * (check->sums[lane + 1] ^ secret_at(11 + 8 * lane + 8));
        whole += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    whole = (whole ^ whole >> 37) * AVALANCHE;
    return whole ^ whole >> 32;
}

/* Number of the first part that ends behind a byte. */
static size_t first_behind(const Part *parts, size_t count, uint64_t byte) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (parts[middle].start + parts[middle].nbytes <= byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Fills a block from the parts that reach into it. What no part has stays, and counts in the checksum that it returns,
   which is none if no check is wanted. */
static uint64_t fill_block(Stripes *count_stripes, uint8_t *body, uint64_t start, uint64_t end, const Part *parts,
                           size_t count, int is_checked) {
    Check check = begin_check(count_stripes, end - start);
    uint64_t at = start;
    for (size_t number = first_behind(parts, count, start); at < end; number++) {
        int is_part = number < count && parts[number].start < end;
        uint64_t begins = !is_part ? end : parts[number].start > at ? parts[number].start : at;
        if (is_checked)
            go_on(&check, NULL, body + at, (begins - at) / STRIPE);
        at = begins;
        if (!is_part)
            break;
        const uint8_t *from = (const uint8_t *)parts[number].source + (at - parts[number].start);
        uint64_t stops = parts[number].start + parts[number].nbytes;
        uint64_t nbytes = (stops < end ? stops : end) - at, whole = nbytes / STRIPE * STRIPE;
        go_on(&check, body + at, from, whole / STRIPE);
        if (whole < nbytes) {
            memcpy(body + at + whole, from + whole, nbytes - whole);
            go_on(&check, NULL, body + at + whole, 1);
        }
        at += (nbytes + STRIPE - 1) / STRIPE * STRIPE;
    }
    return end_check(&check, end - start);
}

void mlflash_fill(int variant, uint8_t *body, uint64_t body_nbytes, uint64_t block_nbytes, const Part *parts,
                  size_t count, const uint8_t *todo, size_t first, size_t last, uint64_t *table) {
    Stripes *count_stripes = stripes_of(variant);
    for (size_t block = first; block < last; block++) {
        uint64_t start = block * block_nbytes, end = start + block_nbytes;
        if (todo[block] == SKIP)
            continue;
        int is_checked = todo[block] == COPY_AND_CHECK;
        end = end < body_nbytes ? end : body_nbytes;
        uint64_t sum = fill_block(count_stripes, body, start, end, parts, count, is_checked);
        if (is_checked)
            table[block] = sum;
    }
    make_visible();
}

void mlflash_copy(int variant, const Pair *pairs, size_t count) {
    Stripes *copy_stripes = stripes_of(variant);
    uint64_t sums[LANES] = {0};
    for (; count; count--, pairs++) {
        uint8_t *to = (uint8_t *)pairs->target;
        const uint8_t *from = (const uint8_t *)pairs->source;
        size_t nbytes = pairs->nbytes;
        if (nbytes >= PAST_CACHES) {
            size_t before = -(uintptr_t)to % STRIPE, whole = (nbytes - before) / STRIPE * STRIPE;
            memcpy(to, from, before);
            copy_stripes(sums, 0, to + before, from + before, whole / STRIPE);
            to += before + whole, from += before + whole, nbytes -= before + whole;
        }
        memcpy(to, from, nbytes);
    }
    make_visible();
}
