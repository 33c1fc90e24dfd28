// Included once for each instruction set, inside a namespace of its own, by
// reduce_kernels_table.cc: no include guard. BAGUA_TARGET is the attribute of that set,
// BAGUA_VECTOR_BYTES its vector's size. Every function bears the attribute itself: a vector
// operation is lowered for the function in which it stands before any inlining.

template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(BAGUA_VECTOR_BYTES)));
};

// A type that is computed with as it is stored. The copies make a load or store of any alignment.
template <class T>
struct Element {
  using Vector = typename VectorOf<T>::Type;
  using Scalar = T;
  BAGUA_TARGET static inline Vector Load(const T* from) {
    Vector vector;
    __builtin_memcpy(&vector, from, sizeof(vector));
    return vector;
  }
  BAGUA_TARGET static inline void Store(T* to, Vector vector) {
    __builtin_memcpy(to, &vector, sizeof(vector));
  }
};

// The 16-bit floating types are computed with in float. A signalling NaN may turn quiet when
// loaded: rounding quiets it anyway.
struct WidenedElement {
  using Vector = VectorOf<float>::Type;
  using Scalar = float;
  using Words = VectorOf<uint32_t>::Type;
  typedef uint16_t Shorts __attribute__((vector_size(BAGUA_VECTOR_BYTES / 2)));
};

template <>
struct Element<Half> : WidenedElement {
  BAGUA_TARGET static inline Vector Load(const Half* from) {
    Shorts bits;
    __builtin_memcpy(&bits, from, sizeof(bits));
#if BAGUA_VECTOR_BYTES == 64
    return (Vector)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits);
#elif BAGUA_VECTOR_BYTES == 32
    return (Vector)_mm256_cvtph_ps((__m128i)bits);
#else
    // As in ToFloat.
    const Words words = __builtin_convertvector(bits, Words);
    const Words magnitude = words & 0x7fffu;
    const Words finite = (Words)((Vector)(magnitude << 13) * 0x1p112f);
    const Words special = (magnitude << 13) | 0x7f800000u;
    return (Vector)((words & 0x8000u) << 16 | ((magnitude >= 0x7c00u) ? special : finite));
#endif
  }
  BAGUA_TARGET static inline void Store(Half* to, Vector vector) {
#if BAGUA_VECTOR_BYTES == 64
    const Shorts bits = (Shorts)_mm512_maskz_cvtps_ph(0xffff, (__m512)vector, kToNearestEven);
#elif BAGUA_VECTOR_BYTES == 32
    const Shorts bits = (Shorts)_mm256_cvtps_ph((__m256)vector, kToNearestEven);
#else
    // As in ToHalf.
    const Words words = (Words)vector;
    const Words magnitude = words & 0x7fffffffu;
    const Words subnormal = (Words)((Vector)magnitude + 0.5f) - 0x3f000000u;
    const Words normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
    const Words nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
    const Words infinity = (Words{}) + 0x7c00u;
    const Words finite = (magnitude < 0x38800000u) ? subnormal : normal;
    const Words number = (magnitude >= 0x477ff000u) ? infinity : finite;
    const Words result = ((vector != vector) ? nan : number) | ((words >> 16) & 0x8000u);
    const Shorts bits = __builtin_convertvector(result, Shorts);
#endif
    __builtin_memcpy(to, &bits, sizeof(bits));
  }
};

template <>
struct Element<Bfloat16> : WidenedElement {
  BAGUA_TARGET static inline Vector Load(const Bfloat16* from) {
    Shorts bits;
    __builtin_memcpy(&bits, from, sizeof(bits));
#if BAGUA_VECTOR_BYTES == 64
    const Words words = (Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)bits);
#elif BAGUA_VECTOR_BYTES == 32
    const Words words = (Words)_mm256_cvtepu16_epi32((__m128i)bits);
#else
    const Words words = __builtin_convertvector(bits, Words);
#endif
    return (Vector)(words << 16);
  }
  // See ToBfloat16.
  BAGUA_TARGET static inline void Store(Bfloat16* to, Vector vector) {
    const Words words = (Words)vector;
    const Words high = words >> 16;
    const Words rounded = (words + 0x7fffu + (high & 1u)) >> 16;
    const Words result = (vector != vector) ? (high | 0x40u) : rounded;
#if BAGUA_VECTOR_BYTES == 64
    const Shorts bits = (Shorts)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)result);
#elif BAGUA_VECTOR_BYTES == 32
    const __m256i packed = _mm256_packus_epi32((__m256i)result, (__m256i)result);
    const Shorts bits =
        (Shorts)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b11011000));
#else
    const Shorts bits = __builtin_convertvector(result, Shorts);
#endif
    __builtin_memcpy(to, &bits, sizeof(bits));
  }
};

template <class T>
using Vector = typename Element<T>::Vector;
template <class T>
constexpr size_t kLanes = BAGUA_VECTOR_BYTES / sizeof(typename Element<T>::Scalar);

struct Add {
  template <class T>
  BAGUA_TARGET static inline Vector<T> Apply(Vector<T> a, Vector<T> b) {
    return a + b;
  }
};
struct Multiply {
  template <class T>
  BAGUA_TARGET static inline Vector<T> Apply(Vector<T> a, Vector<T> b) {
    return a * b;
  }
};
// A NaN in `b` is taken, one in `a` is kept.
struct Min {
  template <class T>
  BAGUA_TARGET static inline Vector<T> Apply(Vector<T> a, Vector<T> b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};
struct Max {
  template <class T>
  BAGUA_TARGET static inline Vector<T> Apply(Vector<T> a, Vector<T> b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};

// A stored octet is true unless zero; a written one is 0 or 1.
struct Bool {
  uint8_t octet;
};
template <>
struct Element<Bool> {
  using Vector = VectorOf<uint8_t>::Type;
  using Scalar = uint8_t;
  BAGUA_TARGET static inline Vector Load(const Bool* from) {
    Vector vector;
    __builtin_memcpy(&vector, from, sizeof(vector));
    return (Vector)(vector != 0) & 1;
  }
  BAGUA_TARGET static inline void Store(Bool* to, Vector vector) {
    __builtin_memcpy(to, &vector, sizeof(vector));
  }
};

template <class T, KernelScaling kScaling>
struct Scaler {
  using Scalar = typename Element<T>::Scalar;
  Scalar pre;
  Scalar post;
  Scalar divide;
  BAGUA_TARGET inline Vector<T> Load(const T* from) const {
    if constexpr (kScaling == KernelScaling::kNone) return Element<T>::Load(from);
    return Element<T>::Load(from) * pre;
  }
  BAGUA_TARGET inline Vector<T> Finish(Vector<T> reduced) const {
    if constexpr (kScaling == KernelScaling::kMultiply) return reduced * post * divide;
    if constexpr (kScaling == KernelScaling::kDivide) return reduced * post / divide;
    return reduced;
  }
};

template <class T, KernelScaling kScaling>
BAGUA_TARGET inline Scaler<T, kScaling> ScalerOf(const KernelFactors& factors) {
  using Scalar = typename Element<T>::Scalar;
  return {static_cast<Scalar>(factors.pre), static_cast<Scalar>(factors.post),
          static_cast<Scalar>(factors.divide)};
}

// Elements from `begin` on, fewer than a vector, computed as a whole one so that an element's bits
// do not depend on where it stands.
template <class T, class Op, KernelScaling kScaling>
BAGUA_TARGET void ReduceTail(const KernelArrays& arrays, const Scaler<T, kScaling>& scaler,
                             size_t begin) {
  const size_t rest = arrays.count - begin;
  if (rest == 0) return;
  T padded[kLanes<T>] = {};
  __builtin_memcpy(padded, static_cast<const T*>(arrays.in[0]) + begin, rest * sizeof(T));
  Vector<T> reduced = scaler.Load(padded);
  for (size_t k = 1; k < arrays.inputs; ++k) {
    __builtin_memcpy(padded, static_cast<const T*>(arrays.in[k]) + begin, rest * sizeof(T));
    reduced = Op::template Apply<T>(reduced, scaler.Load(padded));
  }
  Element<T>::Store(padded, scaler.Finish(reduced));
  for (size_t j = 0; j < arrays.outputs; ++j)
    __builtin_memcpy(static_cast<T*>(arrays.out[j]) + begin, padded, rest * sizeof(T));
}

// Four vectors of one array are read before the next array is turned to.
template <class T, class Op, KernelScaling kScaling>
BAGUA_TARGET void ReduceMany(const KernelArrays& arrays, const KernelFactors& factors) {
  constexpr size_t kStep = kLanes<T>;
  const Scaler<T, kScaling> scaler = ScalerOf<T, kScaling>(factors);
  size_t i = 0;
  for (; i + 4 * kStep <= arrays.count; i += 4 * kStep) {
    const T* from = static_cast<const T*>(arrays.in[0]) + i;
    Vector<T> a = scaler.Load(from);
    Vector<T> b = scaler.Load(from + kStep);
    Vector<T> c = scaler.Load(from + 2 * kStep);
    Vector<T> d = scaler.Load(from + 3 * kStep);
    for (size_t k = 1; k < arrays.inputs; ++k) {
      from = static_cast<const T*>(arrays.in[k]) + i;
      a = Op::template Apply<T>(a, scaler.Load(from));
      b = Op::template Apply<T>(b, scaler.Load(from + kStep));
      c = Op::template Apply<T>(c, scaler.Load(from + 2 * kStep));
      d = Op::template Apply<T>(d, scaler.Load(from + 3 * kStep));
    }
    a = scaler.Finish(a);
    b = scaler.Finish(b);
    c = scaler.Finish(c);
    d = scaler.Finish(d);
    for (size_t j = 0; j < arrays.outputs; ++j) {
      T* to = static_cast<T*>(arrays.out[j]) + i;
      Element<T>::Store(to, a);
      Element<T>::Store(to + kStep, b);
      Element<T>::Store(to + 2 * kStep, c);
      Element<T>::Store(to + 3 * kStep, d);
    }
  }
  for (; i + kStep <= arrays.count; i += kStep) {
    Vector<T> reduced = scaler.Load(static_cast<const T*>(arrays.in[0]) + i);
    for (size_t k = 1; k < arrays.inputs; ++k)
      reduced =
          Op::template Apply<T>(reduced, scaler.Load(static_cast<const T*>(arrays.in[k]) + i));
    reduced = scaler.Finish(reduced);
    for (size_t j = 0; j < arrays.outputs; ++j)
      Element<T>::Store(static_cast<T*>(arrays.out[j]) + i, reduced);
  }
  ReduceTail<T, Op, kScaling>(arrays, scaler, i);
}

template <class T, KernelScaling kScaling, size_t kOutputs>
BAGUA_TARGET void SumTwo(const KernelArrays& arrays, const KernelFactors& factors) {
  const Scaler<T, kScaling> scaler = ScalerOf<T, kScaling>(factors);
  const T* const a = static_cast<const T*>(arrays.in[0]);
  const T* const b = static_cast<const T*>(arrays.in[1]);
  T* const out = static_cast<T*>(arrays.out[0]);
  T* const other = static_cast<T*>(arrays.out[kOutputs - 1]);
  size_t i = 0;
  for (; i + kLanes<T> <= arrays.count; i += kLanes<T>) {
    const Vector<T> sum = scaler.Finish(scaler.Load(a + i) + scaler.Load(b + i));
    Element<T>::Store(out + i, sum);
    if constexpr (kOutputs == 2) Element<T>::Store(other + i, sum);
  }
  ReduceTail<T, Add, kScaling>(arrays, scaler, i);
}

// Min, max and product are seldom scaled: they have no loop for factors alone.
#define BAGUA_SCALED(T, Op) \
  { ReduceMany<T, Op, KernelScaling::kNone>, nullptr, ReduceMany<T, Op, KernelScaling::kDivide> }
#define BAGUA_FLOATING_ROWS(T)                                                               \
  {                                                                                          \
    {ReduceMany<T, Add, KernelScaling::kNone>, ReduceMany<T, Add, KernelScaling::kMultiply>, \
     ReduceMany<T, Add, KernelScaling::kDivide>},                                            \
        BAGUA_SCALED(T, Min), BAGUA_SCALED(T, Max), BAGUA_SCALED(T, Multiply)                \
  }
// Two's complement sums and products are the same bits signed or unsigned, and unsigned ones wrap.
#define BAGUA_INTEGER_ROWS(T, Unsigned)                                                            \
  {                                                                                                \
    {ReduceMany<Unsigned, Add, KernelScaling::kNone>}, {ReduceMany<T, Min, KernelScaling::kNone>}, \
        {ReduceMany<T, Max, KernelScaling::kNone>},                                                \
        {ReduceMany<Unsigned, Multiply, KernelScaling::kNone>},                                    \
  }
#define BAGUA_SUM_OF_TWO(T)                                                               \
  {                                                                                       \
    {SumTwo<T, KernelScaling::kNone, 1>, SumTwo<T, KernelScaling::kNone, 2>},             \
        {SumTwo<T, KernelScaling::kMultiply, 1>, SumTwo<T, KernelScaling::kMultiply, 2>}, \
        {SumTwo<T, KernelScaling::kDivide, 1>, SumTwo<T, KernelScaling::kDivide, 2>},     \
  }

constexpr KernelTable kKernels = {
    {BAGUA_INTEGER_ROWS(uint8_t, uint8_t),
     BAGUA_INTEGER_ROWS(int8_t, uint8_t),
     BAGUA_INTEGER_ROWS(int16_t, uint16_t),
     BAGUA_INTEGER_ROWS(int32_t, uint32_t),
     BAGUA_INTEGER_ROWS(int64_t, uint64_t),
     BAGUA_FLOATING_ROWS(Half),
     BAGUA_FLOATING_ROWS(Bfloat16),
     BAGUA_FLOATING_ROWS(float),
     BAGUA_FLOATING_ROWS(double),
     {{ReduceMany<Bool, Max, KernelScaling::kNone>},
      {ReduceMany<Bool, Min, KernelScaling::kNone>},
      {ReduceMany<Bool, Max, KernelScaling::kNone>},
      {ReduceMany<Bool, Min, KernelScaling::kNone>}}},
    {{},
     {},
     {},
     {},
     {},
     BAGUA_SUM_OF_TWO(Half),
     BAGUA_SUM_OF_TWO(Bfloat16),
     BAGUA_SUM_OF_TWO(float),
     BAGUA_SUM_OF_TWO(double),
     {}},
};

#undef BAGUA_SCALED
#undef BAGUA_FLOATING_ROWS
#undef BAGUA_INTEGER_ROWS
#undef BAGUA_SUM_OF_TWO
