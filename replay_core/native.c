// What measure/ does with numpy, in one pass over the bytes: the figures of two chunks of rows (sums.py), four times as
// fast, and what one chunk looks like (statistics.py), ten times as fast; and the ends of what a replay captures.
//
// What lies in two files in one piece is read here, too, by pread and a block at a time: a whole pair in one call, so that
// threads do not hand Python's lock to each other around every block.
//
// Of a pair d = b - a. Sums of a row run in the numbers' own width over SEGMENT columns and in double beyond; sums of
// columns run over the rows of the chunk. What is not finite makes a sum that is not: the caller looks.
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define SEGMENT 512
#define BLOCK 1024

// GCC on glibc picks the widest vectors that the processor has when the library is loaded.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#if __GNUC__ >= 12
#define WIDEST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define WIDEST
#endif

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_bfloat16(uint16_t half) { return of_bits((uint32_t)half << 16); }

// The exponent is put right by a product, which is exact for subnormals too; infinities and NaN keep all its bits.
static inline float from_float16(uint16_t half) {
    float size = of_bits((uint32_t)(half & 0x7fff) << 13) * 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &size, sizeof bits);
    bits |= (half & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
    return of_bits(bits | (uint32_t)(half & 0x8000) << 16);
}

static inline double same(double value) { return value; }

static inline float as_it_is(float value) { return value; }

// Vectors of 32 bytes, as most processors have them: with wider ones the sums of a row no longer fit their registers.
typedef float Singles __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(32)));
typedef float FewSingles __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(32)));
typedef int32_t Words __attribute__((vector_size(32)));
typedef int64_t Longs __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))

// The next numbers, as two vectors. Those of two bytes are taken apart as a word's lower and upper half, which is the
// cheapest: the first vector holds the even columns, the second the odd ones.
INLINE void two_bfloat16(const uint16_t *at, Singles *two) {
    Bits words;
    memcpy(&words, at, sizeof words);
    two[0] = (Singles)(words << 16);
    two[1] = (Singles)(words & 0xffff0000u);
}

INLINE void two_float16(const uint16_t *at, Singles *two) {
    Bits words;
    memcpy(&words, at, sizeof words);
    for (int half = 0; half < 2; half++, words >>= 16) {
        Bits size = (Bits)((Singles)((words & 0x7fff) << 13) * 0x1p112f);
        size |= (Bits)((words & 0x7c00) == 0x7c00) & 0x7f800000u;
        two[half] = (Singles)(size | (words & 0x8000) << 16);
    }
}

INLINE void two_float32(const float *at, Doubles *two) {
    FewSingles few[2];
    memcpy(few, at, sizeof few);
    for (int half = 0; half < 2; half++) two[half] = __builtin_convertvector(few[half], Doubles);
}

INLINE void two_float64(const double *at, Doubles *two) { memcpy(two, at, 2 * sizeof *two); }

// Sums of columns, from the order in which two_bfloat16 and two_float16 leave 16 of them to their own.
static void in_turn(float *columns) {
    float found[16];
    for (int place = 0; place < 16; place++) found[place % 8 * 2 + place / 8] = columns[place];
    memcpy(columns, found, sizeof found);
}

static void are_in_turn(double *columns) { (void)columns; }

// spans: `count` pairs of first column and the one behind the last; columns between them are left out.
// lines [7, rows], `apart` from line to line: sums of d, a d, a^2, a^4, d^2; the greatest |d| and |d| / |a| (0 / 0 is
// passed over).
// columns_d2, columns_a2 [columns]: zeros, and then the sums. Returns the number of elements that differ.
#define PAIR(NAME, STORED, REAL, LOAD, SIZE, VECTOR, WHOLE, SIGN, TWO, LONGEST, IN_TURN)                               \
    WIDEST int64_t NAME(const STORED *restrict a, const STORED *restrict b, int64_t rows, int64_t columns,             \
                        const int64_t *restrict spans, int64_t count, double *restrict lines, int64_t apart,           \
                        REAL *restrict columns_d2, REAL *restrict columns_a2) {                                        \
        enum { WIDE = sizeof(VECTOR) / sizeof(REAL), BOTH = 2 * WIDE };                                                \
        int64_t unequal = 0;                                                                                           \
        for (int64_t row = 0; row < rows; row++) {                                                                     \
            const STORED *restrict left = a + row * columns, *restrict right = b + row * columns;                      \
            double found[7] = {0};                                                                                     \
            VECTOR most = {0}, most_relative = {0};                                                                    \
            for (int64_t span = 0; span < count; span++)                                                               \
                for (int64_t start = spans[2 * span]; start < spans[2 * span + 1]; start += LONGEST) {                 \
                    int64_t end = spans[2 * span + 1] - start < LONGEST ? spans[2 * span + 1] : start + LONGEST;       \
                    VECTOR part_d = {0}, part_ad = {0}, part_a2 = {0}, part_a4 = {0}, part_d2 = {0};                   \
                    WHOLE differ = {0};                                                                                \
                    int64_t column = start;                                                                            \
                    for (; column + BOTH <= end; column += BOTH) {                                                     \
                        VECTOR two_x[2], two_y[2];                                                                     \
                        TWO(left + column, two_x), TWO(right + column, two_y);                                         \
                        for (int half = 0; half < 2; half++) {                                                         \
                            VECTOR x = two_x[half], d = two_y[half] - x, x2 = x * x, d2 = d * d, sums_d2, sums_a2;     \
                            VECTOR size = (VECTOR)((WHOLE)d & SIGN), relative = size / (VECTOR)((WHOLE)x & SIGN);      \
                            WHOLE more = size > most, more_relative = relative > most_relative;                        \
                            part_d += d;                                                                               \
                            part_ad += x * d;                                                                          \
                            part_a2 += x2;                                                                             \
                            part_a4 += x2 * x2;                                                                        \
                            part_d2 += d2;                                                                             \
                            differ -= d != 0;                                                                          \
                            most = (VECTOR)(((WHOLE)size & more) | ((WHOLE)most & ~more));                             \
                            most_relative = (VECTOR)(((WHOLE)relative & more_relative) |                               \
                                                     ((WHOLE)most_relative & ~more_relative));                         \
                            REAL *at_d2 = columns_d2 + column + half * WIDE, *at_a2 = columns_a2 + column + half * WIDE;\
                            memcpy(&sums_d2, at_d2, sizeof sums_d2), memcpy(&sums_a2, at_a2, sizeof sums_a2);          \
                            sums_d2 += d2, sums_a2 += x2;                                                              \
                            memcpy(at_d2, &sums_d2, sizeof sums_d2), memcpy(at_a2, &sums_a2, sizeof sums_a2);          \
                        }                                                                                              \
                    }                                                                                                  \
                    for (int lane = 0; lane < WIDE; lane++) {                                                          \
                        found[0] += part_d[lane], found[1] += part_ad[lane], found[2] += part_a2[lane];                \
                        found[3] += part_a4[lane], found[4] += part_d2[lane];                                          \
                        unequal += differ[lane];                                                                       \
                    }                                                                                                  \
                    for (; column < end; column++) {                                                                   \
                        REAL x = LOAD(left[column]), d = LOAD(right[column]) - x, x2 = x * x, d2 = d * d;              \
                        REAL size = SIZE(d), relative = size / SIZE(x);                                                \
                        found[0] += d, found[1] += x * d, found[2] += x2, found[3] += x2 * x2, found[4] += d2;         \
                        unequal += d != 0;                                                                             \
                        most[0] = size > most[0] ? size : most[0];                                                     \
                        most_relative[0] = relative > most_relative[0] ? relative : most_relative[0];                  \
                        columns_d2[column] += d2, columns_a2[column] += x2;                                            \
                    }                                                                                                  \
                }                                                                                                      \
            for (int lane = 0; lane < WIDE; lane++) {                                                                  \
                found[5] = most[lane] > found[5] ? most[lane] : found[5];                                              \
                found[6] = most_relative[lane] > found[6] ? most_relative[lane] : found[6];                            \
            }                                                                                                          \
            for (int line = 0; line < 7; line++) lines[line * apart + row] = found[line];                              \
        }                                                                                                              \
        for (int64_t span = 0; span < count; span++)                                                                   \
            for (int64_t start = spans[2 * span]; start < spans[2 * span + 1]; start += LONGEST) {                     \
                int64_t end = spans[2 * span + 1] - start < LONGEST ? spans[2 * span + 1] : start + LONGEST;           \
                for (int64_t column = start; column + BOTH <= end; column += BOTH)                                     \
                    IN_TURN(columns_d2 + column), IN_TURN(columns_a2 + column);                                        \
            }                                                                                                          \
        return unequal;                                                                                                \
    }

// A row is added up in single precision no further than SEGMENT columns, in double to its end.
#define TO_THE_END (INT64_C(1) << 62)
PAIR(pair_bfloat16, uint16_t, float, from_bfloat16, __builtin_fabsf, Singles, Words, INT32_MAX, two_bfloat16, SEGMENT, in_turn)
PAIR(pair_float16, uint16_t, float, from_float16, __builtin_fabsf, Singles, Words, INT32_MAX, two_float16, SEGMENT, in_turn)
PAIR(pair_float32, float, double, same, __builtin_fabs, Doubles, Longs, INT64_MAX, two_float32, TO_THE_END, are_in_turn)
PAIR(pair_float64, double, double, same, __builtin_fabs, Doubles, Longs, INT64_MAX, two_float64, TO_THE_END, are_in_turn)

static inline int8_t truth(uint8_t byte) { return byte != 0; }

// Whether so many bytes of the file were there.
static int read_all(int file, char *into, int64_t bytes, int64_t offset) {
    while (bytes > 0) {
        ssize_t count = pread(file, into, (size_t)bytes, (off_t)offset);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return 0;
        into += count, offset += count, bytes -= count;
    }
    return 1;
}

// Rows of `width` bytes by their numbers, one behind the other. Whether all were there.
int64_t read_rows(int32_t file, int64_t at, int64_t width, const int64_t *numbers, int64_t count, char *into) {
    for (int64_t row = 0; row < count; row++)
        if (!read_all(file, into + row * width, width, at + numbers[row] * width)) return 0;
    return 1;
}

// How many numbers of a block are NaN: those whose bits without the sign stand above infinity's, or, of an 8-bit type that
// has none, above its largest number's. They are counted in the numbers' own width, MOST at a time.
#define NANS(NAME, STORED, COUNT, MOST)                                                                                \
    WIDEST static int64_t NAME(const char *restrict block, int64_t bytes, STORED above) {                              \
        const STORED *restrict values = (const STORED *)block;                                                         \
        const STORED sizes = (STORED)~((STORED)1 << (8 * sizeof(STORED) - 1));                                         \
        int64_t count = bytes / (int64_t)sizeof(STORED), found = 0;                                                    \
        for (int64_t start = 0; start < count; start += MOST) {                                                        \
            int32_t size = count - start < MOST ? (int32_t)(count - start) : MOST;                                     \
            COUNT here = 0;                                                                                            \
            _Pragma("omp simd reduction(+ : here)") for (int32_t place = 0; place < size; place++)                     \
                here += (COUNT)((STORED)(values[start + place] & sizes) > above);                                      \
            found += here;                                                                                             \
        }                                                                                                              \
        return found;                                                                                                  \
    }

NANS(nans_of_8, uint8_t, uint8_t, 255)
NANS(nans_of_16, uint16_t, uint16_t, 32768)
NANS(nans_of_32, uint32_t, uint32_t, 32768)
NANS(nans_of_64, uint64_t, uint64_t, 32768)

static int64_t nans_in(const char *block, int64_t bytes, int64_t width, uint64_t above) {
    switch (width) {
    case 1: return nans_of_8(block, bytes, (uint8_t)above);
    case 2: return nans_of_16(block, bytes, (uint16_t)above);
    case 4: return nans_of_32(block, bytes, (uint32_t)above);
    case 8: return nans_of_64(block, bytes, above);
    default: return 0;
    }
}

// How many numbers of `width` bytes are NaN in a stretch of a file, see NANS; -1 where it could not be read whole. A
// block is a multiple of 8 bytes.
int64_t count_nans(int32_t file, int64_t at, int64_t bytes, int64_t width, uint64_t above, char *room, int64_t block) {
    int64_t found = 0;
    for (int64_t start = 0; start < bytes; start += block) {
        int64_t size = bytes - start < block ? bytes - start : block;
        if (!read_all(file, room, size, at + start)) return -1;
        found += nans_in(room, size, width, above);
    }
    return found;
}

#define PIECE ((int64_t)1 << 14)

// How many bytes two stretches of files have in common at their beginning, as far as whole blocks tell: all of them where
// they are the same; -1 where one could not be read whole. Most that differ do so at once, hence a smaller first block.
// told: how far it is, for whoever looks meanwhile; a number that stops it where it is no longer 0; and how many NaN were
// among numbers of `width` bytes (0: none is looked for) up to there.
int64_t same_bytes(int32_t file_a, int64_t at_a, int32_t file_b, int64_t at_b, int64_t bytes, char *room_a, char *room_b,
                   int64_t first, int64_t block, volatile int64_t *told, int64_t width, uint64_t above) {
    int64_t start = 0;
    for (int64_t size = first; start < bytes; size = block) {
        if (size > bytes - start) size = bytes - start;
        if (!read_all(file_a, room_a, size, at_a + start) || !read_all(file_b, room_b, size, at_b + start)) return -1;
        // What is compared is still in the first cache when its numbers are looked at.
        int64_t nans = 0, piece, at = 0;
        for (; at < size; at += piece) {
            piece = size - at < PIECE ? size - at : PIECE;
            if (memcmp(room_a + at, room_b + at, (size_t)piece)) return start;
            if (width) nans += nans_in(room_a + at, piece, width, above);
        }
        start += size;
        told[0] = start, told[2] += nans;
        if (told[1]) break;
    }
    return start;
}

// Rows of two files, `step` of them at a time.
// runs [count, 3]: the first row of a stretch in a, the one that faces it in b, and how many follow each other in both.
// lines [7, total] as PAIR's, columns_d2, columns_a2 [columns], added to; heavy [2, total, left_out]: a and b of the columns
// that no span covers. real [2, columns]: room. Returns the number of elements that differ; -1 where a file ends before.
#define FILES(NAME, STORED, REAL, LOAD)                                                                                \
    int64_t files_##NAME(int32_t file_a, int64_t at_a, int32_t file_b, int64_t at_b, int64_t columns,                  \
                         const int64_t *runs, int64_t count, int64_t step, const int64_t *spans, int64_t span_count,   \
                         double *lines, int64_t total, double *columns_d2, double *columns_a2, double *heavy,          \
                         char *room_a, char *room_b, REAL *real) {                                                     \
        int64_t unequal = 0, done = 0, run = 0, within = 0, width = columns * (int64_t)sizeof(STORED);                 \
        while (done < total) {                                                                                         \
            int64_t rows = 0;                                                                                          \
            while (rows < step && run < count) {                                                                       \
                const int64_t *here = runs + 3 * run;                                                                  \
                int64_t more = here[2] - within < step - rows ? here[2] - within : step - rows;                        \
                if (!read_all(file_a, room_a + rows * width, more * width, at_a + (here[0] + within) * width) ||       \
                    !read_all(file_b, room_b + rows * width, more * width, at_b + (here[1] + within) * width))         \
                    return -1;                                                                                         \
                rows += more, within += more;                                                                          \
                if (within == here[2]) run++, within = 0;                                                              \
            }                                                                                                          \
            const STORED *a = (const STORED *)room_a, *b = (const STORED *)room_b;                                     \
            memset(real, 0, 2 * (size_t)columns * sizeof(REAL));                                                       \
            unequal += pair_##NAME(a, b, rows, columns, spans, span_count, lines + done, total, real, real + columns); \
            for (int64_t column = 0; column < columns; column++) {                                                     \
                columns_d2[column] += real[column];                                                                    \
                columns_a2[column] += real[columns + column];                                                          \
            }                                                                                                          \
            int64_t left_out = 0;                                                                                      \
            for (int64_t span = 0; span + 1 < span_count; span++) left_out += spans[2 * span + 2] - spans[2 * span + 1]; \
            for (int64_t span = 0, place = 0; span + 1 < span_count; span++)                                           \
                for (int64_t column = spans[2 * span + 1]; column < spans[2 * span + 2]; column++, place++)            \
                    for (int64_t row = 0; row < rows; row++) {                                                         \
                        heavy[(done + row) * left_out + place] = LOAD(a[row * columns + column]);                      \
                        heavy[(total + done + row) * left_out + place] = LOAD(b[row * columns + column]);              \
                    }                                                                                                  \
            done += rows;                                                                                              \
        }                                                                                                              \
        return unequal;                                                                                                \
    }

FILES(bfloat16, uint16_t, float, from_bfloat16)
FILES(float16, uint16_t, float, from_float16)
FILES(float32, float, double, same)
FILES(float64, double, double, same)

// What is added up over a block: a pass that takes all for finite, and one that does not, for a block whose squares say so.
#define BLOCK_SUMS                                                                                                     \
    _Pragma("omp simd reduction(+ : sum, part, finite, nans, over, zeros) reduction(min : low) reduction(max : high)")
#define DEVIATIONS _Pragma("omp simd reduction(+ : near)")

// found: how many are finite, NaN, +inf, -inf, 0; of the finite ones the least, the greatest, the mean, the sum of squares
// around it, and the sum of squares. Infinite and minus infinite extremes where none is finite. All sums run in double; a
// block stays in the processor's first cache while its mean, and then what lies around it, is added up (Chan's merge).
#define MOMENTS(NAME, STORED, REAL, LOAD, SIZE, LARGEST)                                                               \
    WIDEST void NAME(const STORED *restrict values, int64_t count, double *restrict found) {                           \
        const REAL infinite = (REAL)__builtin_inf();                                                                   \
        int64_t total = 0, nan_count = 0, above = 0, below = 0, zero_count = 0;                                        \
        double mean = 0, around = 0, squares = 0;                                                                      \
        REAL least = infinite, most = -infinite;                                                                       \
        for (int64_t start = 0; start < count; start += BLOCK) {                                                       \
            const STORED *restrict block = values + start;                                                             \
            int32_t size = count - start < BLOCK ? (int32_t)(count - start) : BLOCK;                                   \
            double sum = 0, part = 0, near = 0;                                                                        \
            int32_t finite = size, nans = 0, over = 0, zeros = 0;                                                      \
            REAL low = infinite, high = -infinite;                                                                     \
            BLOCK_SUMS                                                                                                 \
            for (int32_t place = 0; place < size; place++) {                                                           \
                REAL x = LOAD(block[place]);                                                                           \
                double here = x;                                                                                       \
                sum += here;                                                                                           \
                part += here * here;                                                                                   \
                zeros += x == 0;                                                                                       \
                low = x < low ? x : low;                                                                               \
                high = x > high ? x : high;                                                                            \
            }                                                                                                          \
            int plain = part <= __DBL_MAX__;                                                                           \
            if (!plain) {                                                                                              \
                sum = part = finite = 0, low = infinite, high = -infinite;                                             \
                BLOCK_SUMS                                                                                             \
                for (int32_t place = 0; place < size; place++) {                                                       \
                    REAL x = LOAD(block[place]);                                                                       \
                    int32_t is_finite = SIZE(x) <= LARGEST;                                                            \
                    double here = is_finite ? x : 0;                                                                   \
                    sum += here;                                                                                       \
                    part += here * here;                                                                               \
                    finite += is_finite;                                                                               \
                    nans += x != x;                                                                                    \
                    over += x > LARGEST;                                                                               \
                    low = is_finite && x < low ? x : low;                                                              \
                    high = is_finite && x > high ? x : high;                                                           \
                }                                                                                                      \
            }                                                                                                          \
            nan_count += nans, above += over, below += size - finite - nans - over, zero_count += zeros;               \
            if (!finite) continue;                                                                                     \
            double middle = sum / finite;                                                                              \
            if (plain) {                                                                                               \
                DEVIATIONS                                                                                             \
                for (int32_t place = 0; place < size; place++) {                                                       \
                    double away = LOAD(block[place]) - middle;                                                         \
                    near += away * away;                                                                               \
                }                                                                                                      \
            } else {                                                                                                   \
                DEVIATIONS                                                                                             \
                for (int32_t place = 0; place < size; place++) {                                                       \
                    REAL x = LOAD(block[place]);                                                                       \
                    double away = SIZE(x) <= LARGEST ? x - middle : 0;                                                 \
                    near += away * away;                                                                               \
                }                                                                                                      \
            }                                                                                                          \
            least = low < least ? low : least, most = high > most ? high : most;                                       \
            double delta = middle - mean, joined = (double)(total + finite);                                           \
            around += near + delta * delta * (double)total * finite / joined;                                          \
            mean += delta * finite / joined;                                                                           \
            squares += part;                                                                                           \
            total += finite;                                                                                           \
        }                                                                                                              \
        double all[10] = {total, nan_count, above, below, zero_count, least, most, mean, around, squares};             \
        memcpy(found, all, sizeof all);                                                                                \
    }

MOMENTS(moments_bfloat16, uint16_t, float, from_bfloat16, __builtin_fabsf, __FLT_MAX__)
MOMENTS(moments_float16, uint16_t, float, from_float16, __builtin_fabsf, __FLT_MAX__)
MOMENTS(moments_float32, float, float, as_it_is, __builtin_fabsf, __FLT_MAX__)
MOMENTS(moments_float64, double, double, same, __builtin_fabs, __DBL_MAX__)
MOMENTS(moments_int64, int64_t, double, same, __builtin_fabs, __DBL_MAX__)
MOMENTS(moments_int32, int32_t, double, same, __builtin_fabs, __DBL_MAX__)
MOMENTS(moments_uint8, uint8_t, float, as_it_is, __builtin_fabsf, __FLT_MAX__)
MOMENTS(moments_bool, uint8_t, float, truth, __builtin_fabsf, __FLT_MAX__)

// Sums that wait for none of the others: a processor adds a vector in four steps, and begins two in each.
#define LANES 32
#define STRETCH 4096

// found: the least, the greatest, and the sum of squares, which run in the numbers' own width over 128 of them and in
// double beyond. What is not finite, and squares that the width cannot hold, make a sum that is not: the caller looks.
#define ENDS(NAME, STORED, REAL, LOAD)                                                                                 \
    WIDEST void NAME(const STORED *restrict values, int64_t count, double *restrict found) {                           \
        REAL low[LANES], high[LANES], part[LANES];                                                                     \
        double squares = 0;                                                                                            \
        for (int lane = 0; lane < LANES; lane++) low[lane] = high[lane] = LOAD(values[0]);                             \
        for (int64_t start = 0; start < count; start += STRETCH) {                                                     \
            const STORED *restrict segment = values + start;                                                           \
            int32_t size = count - start < STRETCH ? (int32_t)(count - start) : STRETCH, whole = size / LANES * LANES; \
            for (int lane = 0; lane < LANES; lane++) part[lane] = 0;                                                   \
            for (int32_t place = 0; place < whole; place += LANES)                                                     \
                _Pragma("omp simd") for (int lane = 0; lane < LANES; lane++) {                                         \
                    REAL x = LOAD(segment[place + lane]);                                                              \
                    part[lane] += x * x;                                                                               \
                    low[lane] = x < low[lane] ? x : low[lane];                                                         \
                    high[lane] = x > high[lane] ? x : high[lane];                                                      \
                }                                                                                                      \
            for (int32_t place = whole; place < size; place++) {                                                       \
                REAL x = LOAD(segment[place]);                                                                         \
                part[0] += x * x;                                                                                      \
                low[0] = x < low[0] ? x : low[0];                                                                      \
                high[0] = x > high[0] ? x : high[0];                                                                   \
            }                                                                                                          \
            for (int lane = 0; lane < LANES; lane++) squares += part[lane];                                            \
        }                                                                                                              \
        for (int lane = 1; lane < LANES; lane++) {                                                                     \
            low[0] = low[lane] < low[0] ? low[lane] : low[0];                                                          \
            high[0] = high[lane] > high[0] ? high[lane] : high[0];                                                     \
        }                                                                                                              \
        found[0] = low[0], found[1] = high[0], found[2] = squares;                                                     \
    }

ENDS(ends_bfloat16, uint16_t, float, from_bfloat16)
ENDS(ends_float16, uint16_t, float, from_float16)
ENDS(ends_float32, float, float, as_it_is)
ENDS(ends_float64, double, double, same)
