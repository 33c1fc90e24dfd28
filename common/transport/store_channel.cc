#include "common/transport/store_channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

namespace bagua {
namespace {

constexpr size_t kFrameHeaderBytes = sizeof(uint32_t) + sizeof(StoreWord);
// Taken in by one Receive, so that one talker does not hold up the others.
constexpr size_t kReadsAtOnce = 4;
// A member of three empty strings and a pid.
constexpr size_t kLeastMemberBytes = 20;

void Encode(const Member& member, Writer* writer) {
  writer->Put(static_cast<int32_t>(member.pid));
  writer->PutString(member.host_id);
  writer->PutString(member.framework);
  writer->PutString(member.address);
  writer->PutString(member.unix_name);
}

Member DecodeMember(Reader* reader, int rank) {
  Member member;
  member.rank = rank;
  member.pid = reader->Get<int32_t>();
  member.host_id = reader->GetString();
  member.framework = reader->GetString();
  member.address = reader->GetString();
  member.unix_name = reader->GetString();
  return member;
}

}  // namespace

Bytes Encode(const Report& report) {
  Writer writer;
  writer.Put(static_cast<int32_t>(report.size));
  writer.Put(report.patience_seconds);
  writer.Put(static_cast<uint8_t>(report.tcp_everywhere));
  Encode(report.member, &writer);
  return writer.Take();
}

Result<Report> DecodeReport(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  Report report;
  report.size = reader.Get<int32_t>();
  report.patience_seconds = reader.Get<double>();
  if (std::isnan(report.patience_seconds)) report.patience_seconds = -1;
  report.tcp_everywhere = reader.Get<uint8_t>() != 0;
  report.member = DecodeMember(&reader, 0);
  BAGUA_RETURN_IF_ERROR(reader.Finish("report"));
  return report;
}

Bytes Encode(const RoundTable& table) {
  Writer writer;
  writer.PutRaw(table.round);
  writer.Put(static_cast<uint32_t>(table.members.size()));
  for (const Member& member : table.members) Encode(member, &writer);
  return writer.Take();
}

Result<RoundTable> DecodeTable(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  RoundTable table;
  table.round = reader.Get<RoundId>();
  table.members.resize(reader.GetCount(kLeastMemberBytes));
  for (size_t rank = 0; rank < table.members.size(); ++rank)
    table.members[rank] = DecodeMember(&reader, static_cast<int>(rank));
  BAGUA_RETURN_IF_ERROR(reader.Finish("table of members"));
  return table;
}

Bytes EncodeFailure(const Status& failure) {
  Writer writer;
  writer.Put(static_cast<uint8_t>(failure.code()));
  // Cut where a text is longer than a rank may send.
  writer.PutString(failure.message().substr(0, kMaxReportBytes / 2));
  return writer.Take();
}

Status DecodeFailure(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  const auto code = reader.Get<uint8_t>();
  std::string text = reader.GetString();
  BAGUA_RETURN_IF_ERROR(reader.Finish("failure"));
  if (code < static_cast<uint8_t>(StatusCode::kInvalidArgument) ||
      code > static_cast<uint8_t>(StatusCode::kInternal))
    return Status(StatusCode::kInternal, "malformed message: failure");
  return Status(static_cast<StatusCode>(code), std::move(text));
}

Status CheckReport(const Report& comer, const std::vector<const Report*>& members, int size) {
  const std::string who = Describe(comer.member);
  const int rank = comer.member.rank;
  const auto wrong = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, std::move(text));
  };
  if (comer.size != size)
    return wrong(StrCat(who, " was started with size ", comer.size,
                        ", the rendezvous store serves ", size,
                        " ranks. Start every rank of the job with the same size"));
  if (rank < 0 || rank >= size) return wrong(StrCat(who, " is none of the ranks 0 to ", size - 1));
  for (const Report* member : members) {
    if (member->member.rank == rank)
      return wrong(StrCat("rank ", rank, " was given twice: ", Describe(member->member), " and ",
                          who, ". Give every process a rank of its own"));
    if (member->tcp_everywhere != comer.tcp_everywhere)
      return Status(
          StatusCode::kMismatch,
          StrCat(who, " was started with BAGUA_TRANSPORT=",
                 comer.tcp_everywhere ? "tcp, " : "auto, ", Describe(member->member), " with ",
                 comer.tcp_everywhere ? "auto" : "tcp", ". Set it alike on all ranks"));
  }
  return {};
}

std::string Describe(const Member& member) {
  if (member.host_id.empty() && member.pid == 0) return StrCat("rank ", member.rank);
  // The part of a host id that people know.
  const std::string host = member.host_id.substr(0, member.host_id.find('/'));
  return StrCat("rank ", member.rank, " (pid ", member.pid, " on host ", host, ")");
}

std::string DescribeRanks(const std::vector<int>& ranks) {
  constexpr size_t kNamed = 16;
  std::string text = ranks.size() > 1 ? "ranks " : "rank ";
  for (size_t i = 0; i < std::min(ranks.size(), kNamed); ++i)
    text += StrCat(i > 0 ? ", " : "", ranks[i]);
  if (ranks.size() > kNamed) text += StrCat(" and ", ranks.size() - kNamed, " more");
  return text;
}

double ToTenths(double seconds) {
  return std::round(seconds * 10) / 10;
}

void StoreChannel::Post(StoreWord word, const Bytes& payload) {
  Writer writer;
  writer.Put(static_cast<uint32_t>(payload.size()));
  writer.Put(word);
  writer.PutRaw(payload);
  const Bytes frame = writer.Take();
  outgoing_.insert(outgoing_.end(), frame.begin(), frame.end());
  Flush();
}

void StoreChannel::Flush() {
  while (sent_ < outgoing_.size()) {
    const ssize_t put = ::send(socket_.get(), outgoing_.data() + sent_, outgoing_.size() - sent_,
                               MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && errno == EAGAIN) return;
    if (put < 0) break;
    sent_ += static_cast<size_t>(put);
  }
  outgoing_.clear();
  sent_ = 0;
}

Status StoreChannel::Receive() {
  std::array<std::byte, 16384> piece;
  for (size_t read = 0; read < kReadsAtOnce;) {
    const ssize_t got = ::recv(socket_.get(), piece.data(), piece.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return {};
    if (got < 0) return Status(StatusCode::kPeerLost, std::strerror(errno));
    if (got == 0) return Status(StatusCode::kPeerLost, "its connection closed");
    incoming_.insert(incoming_.end(), piece.begin(), piece.begin() + got);
    BAGUA_RETURN_IF_ERROR(Split());
    ++read;
  }
  return {};
}

Status StoreChannel::Split() {
  std::span<const std::byte> left(incoming_);
  while (left.size() >= kFrameHeaderBytes) {
    Reader reader(left);
    const auto bytes = reader.Get<uint32_t>();
    const auto word = reader.Get<StoreWord>();
    if (bytes > max_payload_bytes_)
      return Status(StatusCode::kInternal, StrCat("sent a message of ", bytes, " bytes where ",
                                                  max_payload_bytes_, " are allowed"));
    if (left.size() - kFrameHeaderBytes < bytes) break;
    const auto payload = left.subspan(kFrameHeaderBytes, bytes);
    messages_.push_back({word, Bytes(payload.begin(), payload.end())});
    left = left.subspan(kFrameHeaderBytes + bytes);
  }
  incoming_.erase(incoming_.begin(), incoming_.end() - static_cast<std::ptrdiff_t>(left.size()));
  return {};
}

std::optional<StoreMessage> StoreChannel::Take() {
  if (messages_.empty()) return std::nullopt;
  StoreMessage message = std::move(messages_.front());
  messages_.pop_front();
  return message;
}

short StoreChannel::events() const {
  return static_cast<short>(sent_ < outgoing_.size() ? POLLIN | POLLOUT : POLLIN);
}

}  // namespace bagua
