// SHA-256, HMAC and CRC32C against published vectors.
#include "common/base/crypto.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/crc32c.h"
#include "common/base/wire.h"

namespace bagua {
namespace {

Bytes FromText(std::string_view text) {
  const auto raw = std::as_bytes(std::span(text));
  return Bytes(raw.begin(), raw.end());
}

Bytes Repeated(size_t count, int value) {
  return Bytes(count, static_cast<std::byte>(value));
}

Bytes RandomBytes(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::string Sha256Hex(std::span<const std::byte> message) {
  Sha256 hash;
  hash.Update(message);
  return ToHex(hash.Finish());
}

// FIPS 180-4, examples of NIST.
TEST(Sha256, GivesThePublishedDigests) {
  EXPECT_EQ(Sha256Hex({}), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(Sha256Hex(FromText("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(Sha256Hex(FromText("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(Sha256Hex(Repeated(1'000'000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, IsTheSameHoweverTheMessageIsCut) {
  const Bytes message = RandomBytes(300, 1);
  for (size_t length = 0; length <= message.size(); ++length) {
    const auto whole = std::span(message).first(length);
    Sha256 pieces;
    for (size_t at = 0, step = 1; at < length; at += step, step = step % 67 + 1)
      pieces.Update(whole.subspan(at, std::min(step, length - at)));
    ASSERT_EQ(ToHex(pieces.Finish()), Sha256Hex(whole)) << length;
  }
}

struct HmacVector {
  Bytes key;
  Bytes message;
  const char* digest;
};

// RFC 4231, test cases 1 to 4, 6 and 7; number 5 is of a truncated digest.
TEST(HmacSha256, GivesTheDigestsOfRfc4231) {
  Bytes counting;
  for (int i = 1; i <= 25; ++i) counting.push_back(static_cast<std::byte>(i));
  const HmacVector vectors[] = {
      {Repeated(20, 0x0b), FromText("Hi There"),
       "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {FromText("Jefe"), FromText("what do ya want for nothing?"),
       "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {Repeated(20, 0xaa), Repeated(50, 0xdd),
       "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {counting, Repeated(50, 0xcd),
       "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {Repeated(131, 0xaa), FromText("Test Using Larger Than Block-Size Key - Hash Key First"),
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {Repeated(131, 0xaa),
       FromText("This is a test using a larger than block-size key and a larger than block-size "
                "data. The key needs to be hashed before being used by the HMAC algorithm."),
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
  };
  for (const HmacVector& vector : vectors)
    EXPECT_EQ(ToHex(HmacSha256(vector.key, vector.message)), vector.digest);
}

TEST(EqualInConstantTime, SeesEveryBitAndTheLength) {
  const Bytes bytes = RandomBytes(32, 2);
  EXPECT_TRUE(EqualInConstantTime(bytes, bytes));
  EXPECT_TRUE(EqualInConstantTime({}, {}));
  EXPECT_FALSE(EqualInConstantTime(bytes, std::span(bytes).first(31)));
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    Bytes other = bytes;
    other[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_FALSE(EqualInConstantTime(bytes, other)) << bit;
  }
}

TEST(FillRandom, FillsEverythingAndDiffersEachTime) {
  Bytes first(1000);
  Bytes second(1000);
  ASSERT_TRUE(FillRandom(first).ok());
  ASSERT_TRUE(FillRandom(second).ok());
  EXPECT_TRUE(FillRandom({}).ok());
  EXPECT_NE(first, second);
  // 32 equal bytes in a row have a probability below 2^-240.
  EXPECT_EQ(std::search_n(first.begin(), first.end(), 32, first[0]), first.end());
}

// RFC 3720, appendix B.4.
TEST(Crc32c, GivesTheValuesOfRfc3720) {
  Bytes up;
  Bytes down;
  for (int i = 0; i < 32; ++i) {
    up.push_back(static_cast<std::byte>(i));
    down.push_back(static_cast<std::byte>(31 - i));
  }
  Bytes read_command(48);
  for (const auto& [at, value] : {std::pair{0, 0x01},
                                  {1, 0xc0},
                                  {16, 0x14},
                                  {22, 0x04},
                                  {27, 0x14},
                                  {31, 0x18},
                                  {32, 0x28},
                                  {40, 0x02}})
    read_command[at] = static_cast<std::byte>(value);
  const std::pair<Bytes, uint32_t> vectors[] = {
      {Repeated(32, 0), 0x8a9136aa},
      {Repeated(32, 0xff), 0x62a8ab43},
      {up, 0x46dd794e},
      {down, 0x113fdb5c},
      {read_command, 0xd9963a56},
      {{}, 0},
      {FromText("123456789"), 0xe3069283},
  };
  for (const auto& [bytes, value] : vectors) {
    EXPECT_EQ(Crc32c(bytes), value);
    EXPECT_EQ(Crc32cByTable(bytes), value);
  }
}

// The lengths pass the blocks of the three lanes (3 * 128 and 3 * 2048 bytes) and all that is left.
TEST(Crc32c, OfTheInstructionEqualsThatOfTheTables) {
  const Bytes bytes = RandomBytes(20'000, 3);
  std::mt19937 random(4);
  for (size_t length = 0; length < 1200; ++length)
    ASSERT_EQ(Crc32c(std::span(bytes).first(length)), Crc32cByTable(std::span(bytes).first(length)))
        << length;
  for (int i = 0; i < 300; ++i) {
    const size_t begin = random() % 100;
    const auto piece = std::span(bytes).subspan(begin, random() % (bytes.size() - begin));
    const auto before = static_cast<uint32_t>(random());
    ASSERT_EQ(Crc32c(piece, before), Crc32cByTable(piece, before)) << piece.size();
  }
}

TEST(Crc32c, GoesOnWhereAnEarlierPieceEnded) {
  const Bytes bytes = RandomBytes(9'000, 5);
  const uint32_t whole = Crc32c(bytes);
  for (size_t cut = 0; cut <= bytes.size(); cut += 127)
    ASSERT_EQ(Crc32c(std::span(bytes).subspan(cut), Crc32c(std::span(bytes).first(cut))), whole);
}

TEST(Crc32c, ChangesWithEveryFlippedBit) {
  Bytes bytes = RandomBytes(700, 6);
  const uint32_t value = Crc32c(bytes);
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    ASSERT_NE(Crc32c(bytes), value) << bit;
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
  }
}

}  // namespace
}  // namespace bagua
