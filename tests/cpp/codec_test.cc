#include "common/codec/codec.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "common/base/half_cast.h"
#include "common/base/isa.h"
#include "tests/cpp/half_reference.h"

namespace bagua {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Narrow {
  const char* name;
  DType dtype;
  Format16 format;
};
constexpr Narrow kNarrow[] = {{"fp16", DType::kFloat16, kHalfFormat},
                              {"bf16", DType::kBfloat16, kBfloat16Format}};

const Codec* Find(const std::string& name) {
  Result<const Codec*> found = FindCodec(name);
  return found.ok() ? found.value() : nullptr;
}

template <class T>
std::vector<uint16_t> Encode(const Narrow& narrow, DType dtype, const std::vector<T>& values) {
  std::vector<uint16_t> bits(values.size());
  Find(narrow.name)
      ->Encode(dtype, values.data(), values.size(), std::as_writable_bytes(std::span(bits)));
  return bits;
}

template <class T>
std::vector<T> Decode(const Narrow& narrow, DType dtype, const std::vector<uint16_t>& bits) {
  std::vector<T> values(bits.size());
  Find(narrow.name)->Decode(dtype, std::as_bytes(std::span(bits)), bits.size(), values.data());
  return values;
}

std::vector<uint16_t> AllPatterns() {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  return all;
}

bool IsNan(const Narrow& narrow, uint16_t bits) {
  return std::isnan(ReferenceDecode(narrow.format, bits));
}

// Every value halfway between two neighbours, and its own neighbours, of both signs; the largest
// finite one's upper neighbour is what would follow if the exponent went on.
template <class T>
std::vector<T> Halfways(const Narrow& narrow) {
  std::vector<T> values;
  for (int bits = 0; bits < 0x7fff; ++bits) {
    const double low = ReferenceDecode(narrow.format, static_cast<uint16_t>(bits));
    if (!std::isfinite(low)) break;
    double high = ReferenceDecode(narrow.format, static_cast<uint16_t>(bits + 1));
    if (std::isinf(high)) high = std::ldexp(1.0, narrow.format.max_exponent + 1);
    const T middle = static_cast<T>(low + (high - low) / 2);
    for (const T value : {static_cast<T>(low), std::nextafter(middle, T{0}), middle,
                          std::nextafter(middle, std::numeric_limits<T>::infinity())}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  return values;
}

template <class T>
void ExpectRounded(const Narrow& narrow, const std::vector<T>& values,
                   const std::vector<uint16_t>& encoded) {
  size_t wrong = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t expected = ReferenceEncode(narrow.format, values[i]);
    const bool same = std::isnan(values[i]) ? IsNan(narrow, encoded[i]) : encoded[i] == expected;
    if (!same && ++wrong < 5)
      ADD_FAILURE() << narrow.name << " of " << values[i] << ": " << encoded[i] << ", not "
                    << expected;
  }
  EXPECT_EQ(wrong, 0u);
}

class CastCodecTest : public testing::TestWithParam<std::tuple<Narrow, Isa>> {
 protected:
  const Narrow narrow_ = std::get<0>(GetParam());
  const ScopedIsaLimit limit_{std::get<1>(GetParam())};
};
INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, CastCodecTest,
                         testing::Combine(testing::ValuesIn(kNarrow),
                                          testing::Values(Isa::kBaseline, Isa::kAvx2,
                                                          Isa::kAvx512)));

TEST_P(CastCodecTest, EveryPatternDecodesToItsValueAndBack) {
  const std::vector<uint16_t> all = AllPatterns();
  const std::vector<float> floats = Decode<float>(narrow_, DType::kFloat32, all);
  const std::vector<double> doubles = Decode<double>(narrow_, DType::kFloat64, all);
  const std::vector<uint16_t> from_floats = Encode(narrow_, DType::kFloat32, floats);
  const std::vector<uint16_t> from_doubles = Encode(narrow_, DType::kFloat64, doubles);
  for (size_t i = 0; i < all.size(); ++i) {
    if (IsNan(narrow_, all[i])) {
      ASSERT_TRUE(std::isnan(floats[i]) && std::isnan(doubles[i])) << all[i];
      ASSERT_TRUE(IsNan(narrow_, from_floats[i]) && IsNan(narrow_, from_doubles[i])) << all[i];
      continue;
    }
    const double value = ReferenceDecode(narrow_.format, all[i]);
    ASSERT_EQ(std::bit_cast<uint64_t>(doubles[i]), std::bit_cast<uint64_t>(value)) << all[i];
    ASSERT_EQ(floats[i], value) << all[i];
    ASSERT_EQ(from_floats[i], all[i]);
    ASSERT_EQ(from_doubles[i], all[i]);
  }
}

TEST_P(CastCodecTest, GivesTheBitsOfTheScalarConversions) {
  std::vector<float> values;
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 9973)
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
  const std::vector<uint16_t> encoded = Encode(narrow_, DType::kFloat32, values);
  const bool half = narrow_.dtype == DType::kFloat16;
  for (size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(encoded[i], half ? ToHalf(values[i]).bits : ToBfloat16(values[i]).bits)
        << std::bit_cast<uint32_t>(values[i]);
  const std::vector<uint16_t> all = AllPatterns();
  const std::vector<float> decoded = Decode<float>(narrow_, DType::kFloat32, all);
  for (size_t i = 0; i < all.size(); ++i)
    ASSERT_EQ(std::bit_cast<uint32_t>(decoded[i]),
              std::bit_cast<uint32_t>(half ? ToFloat(Half{all[i]}) : ToFloat(Bfloat16{all[i]})))
        << all[i];
}

TEST_P(CastCodecTest, RoundsFloat32ToNearestEven) {
  std::vector<float> values = Halfways<float>(narrow_);
  values.insert(values.end(), {kInfinity, -kInfinity, kNan, std::numeric_limits<float>::max(),
                               std::numeric_limits<float>::denorm_min()});
  ExpectRounded(narrow_, values, Encode(narrow_, DType::kFloat32, values));
}

TEST_P(CastCodecTest, RoundsFloat64OnceNotByWayOfFloat32) {
  std::vector<double> values = Halfways<double>(narrow_);
  values.insert(values.end(), {kInfinity, -kInfinity, kNan, 1e300, -1e300, 1e-300, -1e-300, 0.0,
                               -0.0, std::numeric_limits<double>::denorm_min()});
  ExpectRounded(narrow_, values, Encode(narrow_, DType::kFloat64, values));
}

TEST_P(CastCodecTest, TakesAnyCountAndAlignmentAndWritesNoMore) {
  for (const size_t count : {0, 1, 7, 8, 15, 16, 17, 31, 33, 1000, 1031}) {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i) * 1.37f - 100.0f;
    std::vector<std::byte> unaligned(1 + 4 * count);
    if (count > 0) std::memcpy(unaligned.data() + 1, values.data(), 4 * count);
    std::vector<std::byte> encoded(1 + 2 * count + 1, std::byte{0x5a});
    const Codec* codec = Find(narrow_.name);
    codec->Encode(DType::kFloat32, unaligned.data() + 1, count,
                  std::span(encoded).subspan(1, 2 * count));
    EXPECT_EQ(encoded.front(), std::byte{0x5a});
    EXPECT_EQ(encoded.back(), std::byte{0x5a});
    std::vector<std::byte> decoded(1 + 4 * count + 1, std::byte{0x5a});
    codec->Decode(DType::kFloat32, std::span(encoded).subspan(1, 2 * count), count,
                  decoded.data() + 1);
    EXPECT_EQ(decoded.front(), std::byte{0x5a});
    EXPECT_EQ(decoded.back(), std::byte{0x5a});
    for (size_t i = 0; i < count; ++i) {
      float back = 0;
      std::memcpy(&back, decoded.data() + 1 + 4 * i, 4);
      const uint16_t bits = ReferenceEncode(narrow_.format, values[i]);
      ASSERT_EQ(back, ReferenceDecode(narrow_.format, bits)) << i << " of " << count;
    }
  }
}

TEST(Fp16Codec, WritesTheBytesOfKnownValues) {
  const std::vector<float> values = {0.0f,     -0.0f,    1.0f,       -2.0f,    65504.0f,
                                     65519.0f, 65520.0f, -kInfinity, 0x1p-24f, 0x1p-25f,
                                     0x1p-14f, 0.1f,     2049.0f,    2051.0f};
  EXPECT_EQ(Encode(kNarrow[0], DType::kFloat32, values),
            (std::vector<uint16_t>{0x0000, 0x8000, 0x3c00, 0xc000, 0x7bff, 0x7bff, 0x7c00, 0xfc00,
                                   0x0001, 0x0000, 0x0400, 0x2e66, 0x6800, 0x6802}));
}

TEST(Bf16Codec, WritesTheBytesOfKnownValues) {
  const std::vector<float> values = {
      0.0f, -0.0f, 1.0f,      -2.0f,     3.14159265f,
      0.1f, 1e38f, kInfinity, 0x1p-133f, std::numeric_limits<float>::max()};
  EXPECT_EQ(Encode(kNarrow[1], DType::kFloat32, values),
            (std::vector<uint16_t>{0x0000, 0x8000, 0x3f80, 0xc000, 0x4049, 0x3dcd, 0x7e96, 0x7f80,
                                   0x0001, 0x7f80}));
}

TEST(Codecs, PassOtherTypesThroughUnchanged) {
  for (const char* name : {"none", "fp16", "bf16"}) {
    const Codec* codec = Find(name);
    EXPECT_STREQ(codec->name(), name);
    EXPECT_TRUE(codec->sums_encoded());
    for (int type = 0; type < kDTypeCount; ++type) {
      const DType dtype = static_cast<DType>(type);
      const bool wide = dtype == DType::kFloat32 || dtype == DType::kFloat64;
      if (wide && std::string(name) != "none") continue;
      EXPECT_EQ(codec->encoded_dtype(dtype), dtype) << name;
      constexpr size_t kCount = 37;
      EXPECT_EQ(codec->EncodedBytes(dtype, kCount), kCount * SizeOf(dtype));
      std::vector<std::byte> values(kCount * SizeOf(dtype));
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::byte>(7 * i + 1);
      std::vector<std::byte> encoded(values.size());
      codec->Encode(dtype, values.data(), kCount, encoded);
      EXPECT_EQ(encoded, values) << name << " " << Name(dtype);
      std::vector<std::byte> decoded(values.size());
      codec->Decode(dtype, encoded, kCount, decoded.data());
      EXPECT_EQ(decoded, values) << name << " " << Name(dtype);
      codec->Encode(dtype, nullptr, 0, {});
      codec->Decode(dtype, {}, 0, nullptr);
    }
  }
}

TEST(Codecs, ShrinkTheWideTypes) {
  for (const Narrow& narrow : kNarrow) {
    for (const DType wide : {DType::kFloat32, DType::kFloat64}) {
      EXPECT_EQ(Find(narrow.name)->encoded_dtype(wide), narrow.dtype);
      EXPECT_EQ(Find(narrow.name)->EncodedBytes(wide, 1001), 2002u);
      Find(narrow.name)->Encode(wide, nullptr, 0, {});
      Find(narrow.name)->Decode(wide, {}, 0, nullptr);
    }
  }
}

TEST(FindCodec, NamesTheKnownCodecsWhenItFails) {
  const Result<const Codec*> found = FindCodec("zip");
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(found.status().message(), "compression 'zip' is unknown. Known: none, fp16, bf16.");
  EXPECT_FALSE(FindCodec("").ok());
}

}  // namespace
}  // namespace bagua
