// Decoders of control messages on hostile bytes: no crash, no read past the end (the sanitizers
// look on), and no more memory than the bytes at hand justify.
#include "common/base/wire.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "common/runtime/coordinator.h"
#include "common/runtime/request.h"
#include "common/transport/store_channel.h"

namespace bagua {
namespace {

constexpr uint32_t kHuge = std::numeric_limits<uint32_t>::max();

TEST(Reader, GivesBackWhatTheWriterPut) {
  Writer writer;
  writer.Put(uint8_t{7});
  writer.Put(int64_t{-5});
  writer.PutString("name");
  writer.PutString("");
  writer.PutList(std::vector<int64_t>{1, -2, 3});
  writer.PutList(std::vector<uint32_t>{});
  const Bytes bytes = writer.Take();
  Reader reader(bytes);
  EXPECT_EQ(reader.Get<uint8_t>(), 7);
  EXPECT_EQ(reader.Get<int64_t>(), -5);
  EXPECT_EQ(reader.GetString(), "name");
  EXPECT_EQ(reader.GetString(), "");
  EXPECT_EQ(reader.GetList<int64_t>(), (std::vector<int64_t>{1, -2, 3}));
  EXPECT_TRUE(reader.GetList<uint32_t>().empty());
  EXPECT_TRUE(reader.ok());
  EXPECT_TRUE(reader.Finish("test").ok());
}

TEST(Reader, FailsForGoodAtTheFirstReadPastTheEnd) {
  const Bytes bytes(3, std::byte{1});
  Reader reader(bytes);
  EXPECT_EQ(reader.Get<uint32_t>(), 0u);
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.Get<uint8_t>(), 0);
  EXPECT_EQ(reader.GetString(), "");
  EXPECT_TRUE(reader.GetList<int64_t>().empty());
  EXPECT_EQ(reader.GetCount(1), 0u);
  EXPECT_EQ(reader.Finish("test").code(), StatusCode::kInternal);
}

TEST(Reader, WantsEveryByteUsed) {
  const Bytes bytes(5, std::byte{0});
  Reader reader(bytes);
  reader.Get<uint32_t>();
  EXPECT_FALSE(reader.AtEnd());
  EXPECT_NE(reader.Finish("test").message().find("malformed message: test"), std::string::npos);
}

TEST(Reader, TakesNoLengthThatIsNotThere) {
  for (const uint32_t length : {2u, 5u, 1u << 29, 1u << 31, kHuge}) {
    Writer writer;
    writer.Put(length);
    writer.Put(uint8_t{1});
    const Bytes bytes = writer.Take();
    EXPECT_EQ(Reader(bytes).GetString(), "");
    EXPECT_TRUE(Reader(bytes).GetList<uint8_t>().empty());
    EXPECT_TRUE(Reader(bytes).GetList<int64_t>().empty());
    EXPECT_EQ(Reader(bytes).GetCount(1), 0u);
  }
}

TensorMeta Tensor(DType dtype, std::vector<int64_t> dims) {
  TensorMeta tensor;
  tensor.dtype = dtype;
  tensor.shape.ndim = static_cast<int>(dims.size());
  std::copy(dims.begin(), dims.end(), tensor.shape.dims.begin());
  return tensor;
}

Request ExampleRequest() {
  Request request;
  request.kind = Kind::kAlltoall;
  request.group = 3;
  request.op = ReduceOp::kMax;
  request.root = 1;
  request.prescale = 0.5;
  request.tensors = {Tensor(DType::kFloat32, {}), Tensor(DType::kBfloat16, {3, 0, 7}),
                     Tensor(DType::kInt64, std::vector<int64_t>(kMaxDims, 2))};
  request.splits = {1, 0, 2};
  request.details = {"name=layer", "", "dtype=float32"};
  return request;
}

Submission ExampleSubmission() {
  Submission submission;
  submission.sequence = 9;
  submission.name = "layer3.bias";
  submission.request = ExampleRequest();
  return submission;
}

Response ExampleResponse() {
  Agreement agreed;
  agreed.id = 4;
  agreed.name = "layer3.bias";
  agreed.sizes = {1, 2, 3};
  Agreement known;
  known.id = 2;
  known.known = true;
  known.sequence = 8;
  Agreement failed;
  failed.name = "other";
  failed.error = Status(StatusCode::kMismatch, "rank 1 sent float32[2]");
  Response response;
  response.forgotten = {5, 6};
  response.units.resize(2);
  response.units[0].agreements = {agreed, known};
  response.units[1].agreements = {failed};
  return response;
}

Member ExampleMember(int rank) {
  Member member;
  member.rank = rank;
  member.pid = 4711;
  member.host_id = "node1/8f1c/4026531840";
  member.framework = "torch";
  member.address = "10.0.0.1:4000";
  member.unix_name = "bagua-0123";
  return member;
}

Bytes EncodedSubmission() {
  Writer writer;
  Encode(ExampleSubmission(), &writer);
  return writer.Take();
}

Bytes EncodedRequest() {
  Writer writer;
  Encode(ExampleRequest(), &writer);
  return writer.Take();
}

// What decoding gave: whether it worked, and the memory that the result holds.
struct Decoded {
  bool ok = false;
  size_t bytes_held = 0;
};

size_t Held(const Request& request) {
  size_t bytes = request.tensors.capacity() * sizeof(TensorMeta) +
                 request.splits.capacity() * sizeof(int64_t) +
                 request.details.capacity() * sizeof(std::string);
  for (const std::string& line : request.details) bytes += line.capacity();
  return bytes;
}

size_t Held(const Response& response) {
  size_t bytes =
      response.forgotten.capacity() * sizeof(uint32_t) + response.units.capacity() * sizeof(Unit);
  for (const Unit& unit : response.units) {
    bytes += unit.agreements.capacity() * sizeof(Agreement);
    for (const Agreement& agreement : unit.agreements)
      bytes += agreement.sizes.capacity() * sizeof(int64_t) + agreement.name.capacity();
  }
  return bytes;
}

size_t Held(const RoundTable& table) {
  size_t bytes = table.members.capacity() * sizeof(Member);
  for (const Member& member : table.members)
    bytes += member.host_id.capacity() + member.framework.capacity() + member.address.capacity() +
             member.unix_name.capacity();
  return bytes;
}

struct Format {
  const char* name;
  Bytes example;
  std::function<Decoded(std::span<const std::byte>)> decode;
};

std::vector<Format> Formats() {
  return {
      {"request", EncodedRequest(),
       [](std::span<const std::byte> bytes) {
         Reader reader(bytes);
         Result<Request> request = DecodeRequest(&reader);
         if (!request.ok()) return Decoded{};
         return Decoded{reader.AtEnd(), Held(request.value())};
       }},
      {"submission", EncodedSubmission(),
       [](std::span<const std::byte> bytes) {
         Reader reader(bytes);
         Result<Submission> submission = DecodeSubmission(&reader);
         if (!submission.ok()) return Decoded{};
         return Decoded{reader.AtEnd(), Held(submission.value().request)};
       }},
      {"response", Encode(ExampleResponse()),
       [](std::span<const std::byte> bytes) {
         Reader reader(bytes);
         Result<Response> response = DecodeResponse(&reader);
         if (!response.ok()) return Decoded{};
         return Decoded{true, Held(response.value())};
       }},
      {"report", Encode(Report{3, 2.5, true, ExampleMember(0)}),
       [](std::span<const std::byte> bytes) {
         Result<Report> report = DecodeReport(bytes);
         if (!report.ok()) return Decoded{};
         EXPECT_FALSE(std::isnan(report.value().patience_seconds));
         return Decoded{true, 0};
       }},
      {"table", Encode(RoundTable{{}, {ExampleMember(0), ExampleMember(1), ExampleMember(2)}}),
       [](std::span<const std::byte> bytes) {
         Result<RoundTable> table = DecodeTable(bytes);
         return table.ok() ? Decoded{true, Held(table.value())} : Decoded{};
       }},
      {"failure", EncodeFailure(Status(StatusCode::kPeerLost, "lost rank 1")),
       [](std::span<const std::byte> bytes) {
         const Status status = DecodeFailure(bytes);
         EXPECT_FALSE(status.ok());
         return Decoded{status.code() != StatusCode::kInternal, 0};
       }},
  };
}

// Copied into memory of exactly this size, so that a sanitizer sees a read past the end.
Decoded DecodeExact(const Format& format, const Bytes& bytes) {
  const auto exact = std::make_unique<std::byte[]>(bytes.size());
  if (!bytes.empty()) std::memcpy(exact.get(), bytes.data(), bytes.size());
  const Decoded decoded = format.decode({exact.get(), bytes.size()});
  // A tensor of six bytes becomes its description of some 150.
  EXPECT_LE(decoded.bytes_held, bytes.size() * 40 + 1024) << format.name;
  return decoded;
}

TEST(Decoders, TakeWhatTheEncodersGive) {
  for (const Format& format : Formats())
    EXPECT_TRUE(DecodeExact(format, format.example).ok) << format.name;
}

TEST(Decoders, RefuseEveryTruncation) {
  for (const Format& format : Formats())
    for (size_t length = 0; length < format.example.size(); ++length) {
      const auto end = format.example.begin() + static_cast<std::ptrdiff_t>(length);
      ASSERT_FALSE(DecodeExact(format, Bytes(format.example.begin(), end)).ok)
          << format.name << " cut to " << length;
    }
}

TEST(Decoders, RefuseBytesBehindTheEnd) {
  for (const Format& format : Formats()) {
    Bytes longer = format.example;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(DecodeExact(format, longer).ok) << format.name;
  }
}

TEST(Decoders, SurviveEveryFlippedBit) {
  for (const Format& format : Formats())
    for (size_t bit = 0; bit < format.example.size() * 8; ++bit) {
      Bytes flipped = format.example;
      flipped[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
      DecodeExact(format, flipped);
    }
}

TEST(Decoders, SurviveHugeNumbersInEveryPlace) {
  for (const Format& format : Formats())
    for (size_t at = 0; at + sizeof(kHuge) <= format.example.size(); ++at)
      for (const uint32_t number : {kHuge, 1u << 31, 1u << 24, 4096u}) {
        Bytes changed = format.example;
        std::memcpy(changed.data() + at, &number, sizeof(number));
        DecodeExact(format, changed);
      }
}

TEST(Decoders, SurviveNoise) {
  std::mt19937 random(11);
  for (const Format& format : Formats())
    for (int i = 0; i < 5000; ++i) {
      Bytes noise(random() % 200);
      // Small values look like counts and kinds.
      const unsigned range = i % 2 == 0 ? 256 : 4;
      for (std::byte& byte : noise) byte = static_cast<std::byte>(random() % range);
      DecodeExact(format, noise);
    }
}

TEST(Decoders, SurviveMixturesOfValidMessages) {
  std::mt19937 random(12);
  const std::vector<Format> formats = Formats();
  for (const Format& format : formats)
    for (int i = 0; i < 3000; ++i) {
      const Bytes& other = formats[random() % formats.size()].example;
      Bytes mixed(format.example.begin(),
                  format.example.begin() +
                      static_cast<std::ptrdiff_t>(random() % (format.example.size() + 1)));
      mixed.insert(mixed.end(),
                   other.begin() + static_cast<std::ptrdiff_t>(random() % other.size()),
                   other.end());
      DecodeExact(format, mixed);
    }
}

TEST(Decoders, KeepEveryFieldOfAReportAndATable) {
  Report report{3, 2.5, true, ExampleMember(0)};
  const Report read = DecodeReport(Encode(report)).value();
  EXPECT_EQ(read.size, 3);
  EXPECT_EQ(read.patience_seconds, 2.5);
  EXPECT_TRUE(read.tcp_everywhere);
  RoundTable table{{std::byte{1}, std::byte{2}}, {ExampleMember(0), ExampleMember(1)}};
  const RoundTable same = DecodeTable(Encode(table)).value();
  EXPECT_EQ(same.round, table.round);
  ASSERT_EQ(same.members.size(), 2u);
  for (const Member& member : {read.member, same.members[0], same.members[1]}) {
    const Member example = ExampleMember(member.rank);
    EXPECT_EQ(member.pid, example.pid);
    EXPECT_EQ(member.host_id, example.host_id);
    EXPECT_EQ(member.framework, example.framework);
    EXPECT_EQ(member.address, example.address);
    EXPECT_EQ(member.unix_name, example.unix_name);
  }
  EXPECT_EQ(same.members[1].rank, 1);
}

TEST(Decoders, ReadNotANumberAsPatienceWithoutEnd) {
  Report report;
  report.patience_seconds = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(DecodeReport(Encode(report)).value().patience_seconds, -1);
}

}  // namespace
}  // namespace bagua
