#include "common/collective/reduce_kernels.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "common/base/isa.h"
#include "tests/cpp/half_reference.h"
#include "tests/cpp/reduce_reference.h"

namespace bagua {
namespace {

using reference::Combined;
using reference::CutTo;
using reference::Generate;
using reference::Hash;
using reference::Value;
using reference::Write;

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
constexpr Isa kIsas[] = {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512};
constexpr size_t kCounts[] = {0, 1, 5, 31, 1000, 65537};
constexpr size_t kMost = 65537;
constexpr std::byte kSentinel{0xa5};

// An array that begins at an element but at no vector, with sentinels around it.
class Array {
 public:
  Array(DType dtype, size_t skip, size_t count)
      : begin_(skip * SizeOf(dtype)), size_(count * SizeOf(dtype)) {
    bytes_.assign(begin_ + size_ + 64, kSentinel);
  }
  std::byte* data() { return bytes_.data() + begin_; }
  bool Holds(const std::byte* expected) {
    for (size_t i = 0; i < begin_; ++i)
      if (bytes_[i] != kSentinel) return false;
    for (size_t i = begin_ + size_; i < bytes_.size(); ++i)
      if (bytes_[i] != kSentinel) return false;
    return size_ == 0 || std::memcmp(data(), expected, size_) == 0;
  }

 private:
  size_t begin_;
  size_t size_;
  std::vector<std::byte> bytes_;
};

struct Case {
  std::vector<Array> inputs;
  std::vector<std::byte> expected;
};

Case MakeCase(DType dtype, ReduceOp op, size_t inputs) {
  Case made;
  made.expected.resize(kMost * SizeOf(dtype));
  for (size_t r = 0; r < inputs; ++r) made.inputs.emplace_back(dtype, 1 + r % 3, kMost);
  for (size_t i = 0; i < kMost; ++i) {
    Value reduced;
    for (size_t r = 0; r < inputs; ++r) {
      const Value value = Generate(dtype, op, r, i);
      Write(dtype, value, made.inputs[r].data() + i * SizeOf(dtype));
      reduced = r == 0 ? value : Combined(dtype, op, reduced, value);
    }
    Write(dtype, reduced, made.expected.data() + i * SizeOf(dtype));
  }
  return made;
}

template <class T>
std::vector<T> Reduced(DType dtype, ReduceOp op, std::vector<std::vector<T>> inputs,
                       const Scaling& scaling = {}) {
  std::vector<const void*> in;
  for (const std::vector<T>& input : inputs) in.push_back(input.data());
  std::vector<T> out(inputs[0].size());
  void* const outputs[] = {out.data()};
  Reduce(dtype, op, in, outputs, out.size(), scaling);
  return out;
}

class ReduceTest : public testing::TestWithParam<int> {
 protected:
  const DType dtype_ = static_cast<DType>(GetParam());
};
INSTANTIATE_TEST_SUITE_P(EveryType, ReduceTest, testing::Range(0, kDTypeCount),
                         [](const auto& param) { return Name(static_cast<DType>(param.param)); });

TEST_P(ReduceTest, GivesEveryOutputTheReductionOfAllInputs) {
  for (const ReduceOp op : kOps) {
    for (const size_t inputs : {1, 2, 3, 5, 8}) {
      Case made = MakeCase(dtype_, op, inputs);
      std::vector<const void*> in;
      for (Array& input : made.inputs) in.push_back(input.data());
      for (const size_t outputs : {1, 2, 3}) {
        for (const size_t count : kCounts) {
          for (const Isa isa : kIsas) {
            const ScopedIsaLimit limit(isa);
            std::vector<Array> results;
            std::vector<void*> out;
            for (size_t j = 0; j < outputs; ++j) results.emplace_back(dtype_, 1 + 2 * j, count);
            for (Array& result : results) out.push_back(result.data());
            Reduce(dtype_, op, in, out, count);
            for (size_t j = 0; j < outputs; ++j)
              ASSERT_TRUE(results[j].Holds(made.expected.data()))
                  << Name(op) << " of " << inputs << " inputs, output " << j << " of " << outputs
                  << ", count " << count << ", instruction set " << static_cast<int>(isa);
          }
        }
      }
    }
  }
}

TEST_P(ReduceTest, WritesInPlace) {
  constexpr size_t kCount = 1003;
  for (const ReduceOp op : kOps) {
    for (const size_t inputs : {1, 2, 3, 5}) {
      Case made = MakeCase(dtype_, op, inputs);
      for (size_t outputs = 1; outputs <= inputs; ++outputs) {
        for (const Isa isa : kIsas) {
          const ScopedIsaLimit limit(isa);
          std::vector<Array> arrays;
          std::vector<const void*> in;
          std::vector<void*> out;
          for (size_t r = 0; r < inputs; ++r) {
            arrays.emplace_back(dtype_, 1 + r % 3, kCount);
            std::memcpy(arrays[r].data(), made.inputs[r].data(), kCount * SizeOf(dtype_));
          }
          for (Array& array : arrays) in.push_back(array.data());
          // In reverse: the input that is read last is written first.
          for (size_t j = 0; j < outputs; ++j) out.push_back(arrays[inputs - 1 - j].data());
          Reduce(dtype_, op, in, out, kCount);
          for (size_t j = 0; j < outputs; ++j)
            ASSERT_TRUE(arrays[inputs - 1 - j].Holds(made.expected.data()))
                << Name(op) << " of " << inputs << " inputs to " << outputs;
        }
      }
    }
  }
}

TEST_P(ReduceTest, TakesOneArrayAsSeveralInputs) {
  constexpr size_t kCount = 77;
  for (const ReduceOp op : kOps) {
    Case made = MakeCase(dtype_, op, 1);
    std::vector<std::byte> expected(kCount * SizeOf(dtype_));
    for (size_t i = 0; i < kCount; ++i) {
      const Value value = Generate(dtype_, op, 0, i);
      const Value thrice = Combined(dtype_, op, Combined(dtype_, op, value, value), value);
      Write(dtype_, thrice, expected.data() + i * SizeOf(dtype_));
    }
    const void* const in[] = {made.inputs[0].data(), made.inputs[0].data(), made.inputs[0].data()};
    Array result(dtype_, 0, kCount);
    void* const out[] = {result.data()};
    Reduce(dtype_, op, in, out, kCount);
    EXPECT_TRUE(result.Holds(expected.data())) << Name(op);
  }
}

// Ratios, so that truncation can be told in integers: pre = numerator / denominator, and so on.
struct Ratio {
  int64_t numerator;
  int64_t denominator;
  double value() const { return static_cast<double>(numerator) / static_cast<double>(denominator); }
  int64_t Of(int64_t x) const { return x * numerator / denominator; }
};
struct ScalingCase {
  Ratio pre;
  Ratio post;
  int64_t divisor;
  Scaling scaling() const { return {pre.value(), post.value(), divisor}; }
};
constexpr ScalingCase kScalings[] = {
    {{1, 1}, {1, 1}, 2}, {{1, 1}, {1, 1}, 3},  {{3, 2}, {1, 1}, 1},      {{1, 1}, {-1, 2}, 1},
    {{1, 2}, {3, 1}, 7}, {{-1, 1}, {5, 4}, 4}, {{1, 1}, {1, 1}, 1000003}};

// Small enough that nothing overflows; the factors' products stay exact.
Value GenerateSmall(DType dtype, ReduceOp op, size_t rank, size_t index) {
  const uint64_t random = Hash(rank * 7919 + index);
  if (dtype == DType::kUint8) return {static_cast<int64_t>(random % 8), 0};
  if (op == ReduceOp::kProduct && !IsFloating(dtype))
    return {static_cast<int64_t>(random % 7) - 3, 0};
  if (!IsFloating(dtype)) return {static_cast<int64_t>(random % 21) - 10, 0};
  return Generate(dtype, op, rank, index);
}

Value ScaledExpectation(DType dtype, ReduceOp op, const ScalingCase& by, size_t inputs, size_t i) {
  Value reduced;
  for (size_t r = 0; r < inputs; ++r) {
    Value value = GenerateSmall(dtype, op, r, i);
    value = {by.pre.Of(value.integer), value.real * by.pre.value()};
    reduced = r == 0 ? value : Combined(dtype, op, reduced, value);
  }
  return {by.post.Of(reduced.integer) / by.divisor,
          reduced.real * by.post.value() / static_cast<double>(by.divisor)};
}

class ScaledReduceTest : public ReduceTest {};
INSTANTIATE_TEST_SUITE_P(EveryTypeButBool, ScaledReduceTest,
                         testing::Range(0, static_cast<int>(DType::kBool)),
                         [](const auto& param) { return Name(static_cast<DType>(param.param)); });

TEST_P(ScaledReduceTest, ScalesBeforeAfterAndByTheDivisor) {
  constexpr size_t kCount = 1500;
  for (const ScalingCase& by : kScalings) {
    const bool negative = by.pre.numerator < 0 || by.post.numerator < 0;
    if (dtype_ == DType::kUint8 && negative) continue;
    for (const ReduceOp op : kOps) {
      for (const size_t inputs : {1, 2, 3, 5}) {
        if (inputs > 3 && op == ReduceOp::kProduct) continue;
        std::vector<Array> arrays;
        for (size_t r = 0; r < inputs; ++r) {
          arrays.emplace_back(dtype_, 1, kCount);
          for (size_t i = 0; i < kCount; ++i)
            Write(dtype_, GenerateSmall(dtype_, op, r, i), arrays[r].data() + i * SizeOf(dtype_));
        }
        std::vector<std::byte> expected(kCount * SizeOf(dtype_));
        for (size_t i = 0; i < kCount; ++i) {
          Value value = ScaledExpectation(dtype_, op, by, inputs, i);
          value.integer = CutTo(dtype_, value.integer);
          Write(dtype_, value, expected.data() + i * SizeOf(dtype_));
        }
        std::vector<const void*> in;
        for (Array& array : arrays) in.push_back(array.data());
        for (const size_t outputs : {1, 2, 3}) {
          for (const Isa isa : kIsas) {
            const ScopedIsaLimit limit(isa);
            std::vector<Array> results;
            std::vector<void*> out;
            for (size_t j = 0; j < outputs; ++j) results.emplace_back(dtype_, 1, kCount);
            for (Array& result : results) out.push_back(result.data());
            Reduce(dtype_, op, in, out, kCount, by.scaling());
            for (Array& result : results)
              ASSERT_TRUE(result.Holds(expected.data()))
                  << Name(op) << " of " << inputs << " inputs: " << by.pre.value() << ", "
                  << by.post.value() << " / " << by.divisor;
          }
        }
      }
    }
  }
}

TEST_P(ReduceTest, ScaleEqualsTheSumOfOneInput) {
  constexpr size_t kCount = 1001;
  for (const ScalingCase& by : kScalings) {
    Case made = MakeCase(dtype_, ReduceOp::kSum, 1);
    Array data(dtype_, 1, kCount);
    std::memcpy(data.data(), made.inputs[0].data(), kCount * SizeOf(dtype_));
    Array expected(dtype_, 0, kCount);
    const void* const in[] = {data.data()};
    void* const out[] = {expected.data()};
    Reduce(dtype_, ReduceOp::kSum, in, out, kCount, by.scaling());
    Scale(dtype_, data.data(), kCount, by.scaling());
    EXPECT_TRUE(data.Holds(expected.data()));
    Scale(dtype_, nullptr, 0, by.scaling());
  }
}

TEST(Reduce, AveragesNegativeIntegersTowardsZero) {
  EXPECT_EQ(Reduced<int32_t>(DType::kInt32, ReduceOp::kSum,
                             {{-3, -1, 7, 2147483647}, {-2, 0, -14, 0}}, {1.0, 1.0, 2}),
            (std::vector<int32_t>{-2, 0, -3, 1073741823}));
  const int64_t big = (int64_t{1} << 60) + 1;
  EXPECT_EQ(Reduced<int64_t>(DType::kInt64, ReduceOp::kSum, {{-7, big}, {0, 0}}, {1.0, 1.0, 2}),
            (std::vector<int64_t>{-3, big / 2}));
}

TEST(Reduce, HoldsScaledIntegersWithinTheirRange) {
  const auto scaled = [](auto value, DType dtype, double pre) {
    return Reduced<decltype(value)>(dtype, ReduceOp::kSum, {{value}}, {pre, 1.0, 1})[0];
  };
  EXPECT_EQ(scaled(uint8_t{200}, DType::kUint8, 2.0), 255);
  EXPECT_EQ(scaled(uint8_t{200}, DType::kUint8, -2.0), 0);
  EXPECT_EQ(scaled(int8_t{-100}, DType::kInt8, 1.5), -128);
  EXPECT_EQ(scaled(int16_t{-1}, DType::kInt16, 32768.9), -32768);
  EXPECT_EQ(scaled(int32_t{1}, DType::kInt32, 2147483647.5), 2147483647);
  EXPECT_EQ(scaled(int32_t{2}, DType::kInt32, 1e300), 2147483647);
  EXPECT_EQ(scaled(int64_t{1}, DType::kInt64, 0x1p63), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(scaled(int64_t{-1}, DType::kInt64, 0x1p70), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(scaled(int64_t{5}, DType::kInt64, std::nan("")), 0);
}

TEST(Reduce, TakesAnyOctetButZeroForTrueAndWritesOne) {
  const std::vector<uint8_t> a = {0, 2, 0, 255};
  const std::vector<uint8_t> b = {0, 0, 4, 1};
  EXPECT_EQ(Reduced<uint8_t>(DType::kBool, ReduceOp::kSum, {a, b}),
            (std::vector<uint8_t>{0, 1, 1, 1}));
  EXPECT_EQ(Reduced<uint8_t>(DType::kBool, ReduceOp::kMin, {a, b}),
            (std::vector<uint8_t>{0, 0, 0, 1}));
  EXPECT_EQ(Reduced<uint8_t>(DType::kBool, ReduceOp::kSum, {a, b}, {0.5, 1.0, 3}),
            (std::vector<uint8_t>{0, 1, 1, 1}));
}

TEST(Reduce, AddsFloat32InTheOrderOfInputs) {
  const std::vector<float> big(40, 1e8f);
  const std::vector<float> one(40, 1.0f);
  const std::vector<float> minus(40, -1e8f);
  EXPECT_EQ(Reduced<float>(DType::kFloat32, ReduceOp::kSum, {big, one, minus}),
            std::vector<float>(40, 0.0f));
  EXPECT_EQ(Reduced<float>(DType::kFloat32, ReduceOp::kSum, {big, minus, one}),
            std::vector<float>(40, 1.0f));
}

TEST(Reduce, RoundsSixteenBitSumsOnce) {
  const auto filled = [](Format16 format, double value) {
    return std::vector<uint16_t>(40, ReferenceEncode(format, value));
  };
  for (const Isa isa : kIsas) {
    const ScopedIsaLimit limit(isa);
    const Format16 half = kHalfFormat;
    EXPECT_EQ(Reduced<uint16_t>(DType::kFloat16, ReduceOp::kSum,
                                {filled(half, 2048), filled(half, 1), filled(half, 1)}),
              filled(half, 2050));
    // The sum alone would be infinite.
    EXPECT_EQ(Reduced<uint16_t>(DType::kFloat16, ReduceOp::kSum,
                                {filled(half, 60000), filled(half, 60000)}, {1.0, 1.0, 2}),
              filled(half, 60000));
    const Format16 bfloat = kBfloat16Format;
    EXPECT_EQ(Reduced<uint16_t>(DType::kBfloat16, ReduceOp::kSum,
                                {filled(bfloat, 256), filled(bfloat, 1), filled(bfloat, 1)}),
              filled(bfloat, 258));
  }
}

// Of every type that has them, by its bits.
struct Specials {
  DType dtype;
  uint64_t nan;
  uint64_t infinity;
  uint64_t minus_infinity;
  uint64_t one;
  bool IsNan(uint64_t bits) const {
    const uint64_t sign = uint64_t{1} << (8 * SizeOf(dtype) - 1);
    return (bits & (sign - 1)) > infinity;
  }
};
constexpr Specials kSpecials[] = {{DType::kFloat16, 0x7e01, 0x7c00, 0xfc00, 0x3c00},
                                  {DType::kBfloat16, 0x7fc1, 0x7f80, 0xff80, 0x3f80},
                                  {DType::kFloat32, 0x7fc00001, 0x7f800000, 0xff800000, 0x3f800000},
                                  {DType::kFloat64, 0x7ff8000000000001, 0x7ff0000000000000,
                                   0xfff0000000000000, 0x3ff0000000000000}};

// Long enough for the vectors, so that each pair passes through vector and tail.
std::vector<uint64_t> ReduceRepeated(const Specials& type, ReduceOp op, uint64_t a, uint64_t b) {
  constexpr size_t kCount = 71;
  const size_t each = SizeOf(type.dtype);
  std::vector<std::byte> in_a(kCount * each);
  std::vector<std::byte> in_b(kCount * each);
  std::vector<std::byte> result(kCount * each);
  for (size_t i = 0; i < kCount; ++i) {
    std::memcpy(in_a.data() + i * each, &a, each);
    std::memcpy(in_b.data() + i * each, &b, each);
  }
  const void* const in[] = {in_a.data(), in_b.data()};
  void* const out[] = {result.data()};
  Reduce(type.dtype, op, in, out, kCount);
  std::vector<uint64_t> bits(kCount);
  for (size_t i = 0; i < kCount; ++i) std::memcpy(&bits[i], result.data() + i * each, each);
  return bits;
}

TEST(Reduce, PropagatesNanAndInfinity) {
  for (const Isa isa : kIsas) {
    const ScopedIsaLimit limit(isa);
    for (const Specials& type : kSpecials) {
      for (const ReduceOp op : kOps) {
        for (const uint64_t other : {type.one, type.infinity, type.minus_infinity, type.nan}) {
          for (const uint64_t bits : ReduceRepeated(type, op, type.nan, other))
            ASSERT_TRUE(type.IsNan(bits)) << Name(type.dtype) << " " << Name(op);
          for (const uint64_t bits : ReduceRepeated(type, op, other, type.nan))
            ASSERT_TRUE(type.IsNan(bits)) << Name(type.dtype) << " " << Name(op);
        }
      }
      const auto expect = [&type](ReduceOp op, uint64_t a, uint64_t b, uint64_t expected) {
        for (const uint64_t bits : ReduceRepeated(type, op, a, b))
          ASSERT_EQ(bits, expected) << Name(type.dtype) << " " << Name(op);
      };
      expect(ReduceOp::kSum, type.one, type.infinity, type.infinity);
      expect(ReduceOp::kMin, type.one, type.infinity, type.one);
      expect(ReduceOp::kMin, type.minus_infinity, type.one, type.minus_infinity);
      expect(ReduceOp::kMax, type.one, type.minus_infinity, type.one);
      expect(ReduceOp::kProduct, type.infinity, type.minus_infinity, type.minus_infinity);
      for (const uint64_t bits :
           ReduceRepeated(type, ReduceOp::kSum, type.infinity, type.minus_infinity))
        ASSERT_TRUE(type.IsNan(bits));
    }
  }
}

// Values of which nearly every operation rounds.
std::vector<float> Ragged(size_t rank, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t random = Hash(rank * 131071 + i);
    const double fraction = static_cast<double>(random >> 11) * 0x1p-53 - 0.5;
    values[i] = static_cast<float>(std::ldexp(fraction, static_cast<int>(random % 24) - 12));
  }
  return values;
}

TEST(Reduce, RoundsEachStepOnceWithTheSameBitsOnEveryInstructionSet) {
  constexpr size_t kCount = 4099;
  const std::vector<float> a = Ragged(0, kCount);
  const std::vector<float> b = Ragged(1, kCount);
  const std::vector<float> c = Ragged(2, kCount);
  for (const Scaling& scaling : {Scaling{}, Scaling{0.3, 1.7, 4}, Scaling{0.3, 1.7, 7}}) {
    const float pre = static_cast<float>(scaling.pre);
    const float post = static_cast<float>(scaling.post);
    const float divisor = static_cast<float>(scaling.divisor);
    std::vector<float> expected(kCount);
    for (size_t i = 0; i < kCount; ++i) {
      const float x = pre * a[i];
      const float y = pre * b[i];
      const float z = pre * c[i];
      const float xy = x + y;
      const float sum = xy + z;
      const float scaled = sum * post;
      expected[i] = scaled / divisor;
    }
    for (const Isa isa : kIsas) {
      const ScopedIsaLimit limit(isa);
      EXPECT_EQ(Reduced<float>(DType::kFloat32, ReduceOp::kSum, {a, b, c}, scaling), expected);
    }
  }
}

}  // namespace
}  // namespace bagua
