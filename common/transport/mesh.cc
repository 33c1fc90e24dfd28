#include "common/transport/mesh.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "common/base/check.h"
#include "common/base/crc32c.h"

namespace bagua {
namespace {

constexpr uint32_t kMagic = 0x42475531;
constexpr size_t kKeepBlock = size_t{1} << 20;
constexpr uint64_t kMaxControlBytes = uint64_t{1} << 30;

// Precedes every message.
struct Header {
  uint64_t bytes;
  uint64_t step;
  uint32_t channel;
  uint32_t bucket;
  uint32_t crc;    // of the payload, where bytes leave the host
  uint32_t check;  // of all before
};
static_assert(sizeof(Header) == 32);

// A damaged length must not be waited for.
uint32_t CheckOf(const Header& header) {
  return kMagic ^ Crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(Header, check)));
}

Header MakeHeader(const Tag& tag, std::span<const std::byte> payload, bool leaves_host) {
  Header header{payload.size(), tag.step, tag.channel, tag.bucket, 0, 0};
  if (leaves_host) header.crc = Crc32c(payload);
  header.check = CheckOf(header);
  return header;
}

Tag TagOf(const Header& header) {
  return {header.channel, header.bucket, header.step};
}

}  // namespace

std::string DescribeMessage(const Tag& tag, uint64_t bytes) {
  if (tag.channel < kFirstPlanChannel)
    return StrCat("operation ", tag.step, " of group ", tag.channel, " (", bytes, " bytes)");
  return StrCat("step ", tag.step, " of bucket ", tag.bucket, " of plan ",
                tag.channel - kFirstPlanChannel, " (", bytes, " bytes)");
}

struct Mesh::SendOperation {
  Header header;
  std::span<const std::byte> payload;
  Bytes owned;      // control messages own their payload
  size_t sent = 0;  // header and payload
  bool done = false;
  Stream* stream = nullptr;
  ~SendOperation();
};

struct Mesh::RecvOperation {
  Tag tag;
  std::span<std::byte> dst;
  bool done = false;
  Stream* stream = nullptr;
  ~RecvOperation();
};

// One pipe: what is to be written, and the message that is being read.
struct Mesh::Stream {
  struct Kept {
    Tag tag;
    Bytes payload;
  };
  struct Channel {
    std::deque<RecvOperation*> posted;
    std::deque<Kept> kept;
  };

  std::unique_ptr<Pipe> pipe;
  bool is_control = false;
  std::deque<SendOperation*> outgoing;
  std::map<uint32_t, Channel> channels;
  Header header{};
  size_t header_bytes = 0;
  uint64_t payload_bytes = 0;
  RecvOperation* target = nullptr;  // payload goes there; else it is kept
  Bytes keep;
};

struct Mesh::PeerState {
  Stream control;
  Stream data;
};

Mesh::SendOperation::~SendOperation() {
  if (stream != nullptr) std::erase(stream->outgoing, this);
}

Mesh::RecvOperation::~RecvOperation() {
  if (stream == nullptr) return;
  std::erase(stream->channels[tag.channel].posted, this);
  if (stream->target == this) stream->target = nullptr;
}

Mesh::Mesh(int rank, std::vector<PeerPipes> peers, Scheduler* scheduler)
    : rank_(rank), scheduler_(scheduler) {
  for (PeerPipes& pipes : peers) {
    auto state = std::make_unique<PeerState>();
    state->control.pipe = std::move(pipes.control);
    state->control.is_control = true;
    state->data.pipe = std::move(pipes.data);
    peers_.push_back(std::move(state));
  }
}

Mesh::~Mesh() {
  for (const auto& peer : peers_) {
    for (SendOperation* operation : peer->control.outgoing) {
      operation->stream = nullptr;
      delete operation;  // control messages belong to the mesh
    }
    for (SendOperation* operation : peer->data.outgoing) operation->stream = nullptr;
    for (auto& [id, channel] : peer->data.channels)
      for (RecvOperation* operation : channel.posted) operation->stream = nullptr;
  }
}

void Mesh::Count(const Stream& stream, size_t bytes) {
  counters_.messages_sent.fetch_add(1, std::memory_order_relaxed);
  auto& total = stream.pipe->leaves_host() ? counters_.bytes_sent_tcp : counters_.bytes_sent_ring;
  total.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
}

Task<Status> Mesh::Send(int peer, Tag tag, std::span<const std::byte> src) {
  Stream& stream = peers_[peer]->data;
  SendOperation operation;
  operation.header = MakeHeader(tag, src, stream.pipe->leaves_host());
  operation.payload = src;
  operation.stream = &stream;
  stream.outgoing.push_back(&operation);
  Count(stream, src.size());
  if (stream.outgoing.size() == 1) {
    bool moved = false;
    const Status written = Flush(&stream, &moved);
    // A broken pipe is reported, with the rank's name, by Progress.
    if (written.ok() && operation.done) co_return Status();
  }
  co_return co_await scheduler_->Until([&operation] { return operation.done; }, peer);
}

Task<Status> Mesh::Recv(int peer, Tag tag, std::span<std::byte> dst) {
  Stream& stream = peers_[peer]->data;
  Stream::Channel& channel = stream.channels[tag.channel];
  RecvOperation operation{tag, dst};
  if (channel.posted.empty() && !channel.kept.empty()) {
    const Stream::Kept kept = std::move(channel.kept.front());
    channel.kept.pop_front();
    co_return Deliver(peer, &operation, kept.tag, kept.payload);
  }
  operation.stream = &stream;
  channel.posted.push_back(&operation);
  co_return co_await scheduler_->Until([&operation] { return operation.done; }, peer);
}

Status Mesh::Deliver(int peer, RecvOperation* receive, const Tag& tag,
                     std::span<const std::byte> kept) {
  if (tag != receive->tag || kept.size() != receive->dst.size())
    return Status(StatusCode::kMismatch,
                  StrCat("rank ", peer, " sent ", DescribeMessage(tag, kept.size()), " where rank ",
                         rank_, " expects ", DescribeMessage(receive->tag, receive->dst.size()),
                         ". All ranks must run the same steps of the same model."));
  if (!kept.empty()) std::memcpy(receive->dst.data(), kept.data(), kept.size());
  receive->done = true;
  return {};
}

void Mesh::PostControl(int peer, Bytes message) {
  Stream& stream = peers_[peer]->control;
  auto* operation = new SendOperation;
  operation->owned = std::move(message);
  operation->payload = operation->owned;
  operation->header = MakeHeader({}, operation->payload, stream.pipe->leaves_host());
  operation->stream = &stream;
  stream.outgoing.push_back(operation);
  Count(stream, operation->payload.size());
  bool moved = false;
  [[maybe_unused]] const Status later = Flush(&stream, &moved);  // Progress reports a failure
}

std::optional<Mesh::Control> Mesh::TakeControl() {
  if (control_.empty()) return std::nullopt;
  Control message = std::move(control_.front());
  control_.pop_front();
  return message;
}

Status Mesh::Progress(bool* moved) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    for (Stream* stream : {&peers_[peer]->control, &peers_[peer]->data}) {
      Status status = ProgressStream(peer, stream, moved);
      if (!status.ok()) return status;
    }
  }
  return {};
}

Status Mesh::ProgressStream(int peer, Stream* stream, bool* moved) {
  Status status = Flush(stream, moved);
  if (status.ok()) status = ReadAvailable(peer, stream, moved);
  if (status.code() == StatusCode::kPeerLost) return status.WithContext(StrCat("lost rank ", peer));
  return status;
}

Status Mesh::Flush(Stream* stream, bool* moved) {
  while (!stream->outgoing.empty()) {
    SendOperation* const operation = stream->outgoing.front();
    const auto header = std::as_bytes(std::span(&operation->header, 1));
    while (operation->sent < header.size() + operation->payload.size()) {
      const bool in_header = operation->sent < header.size();
      const auto rest = in_header ? header.subspan(operation->sent)
                                  : operation->payload.subspan(operation->sent - header.size());
      size_t taken = 0;
      BAGUA_RETURN_IF_ERROR(
          stream->pipe->Write(rest, in_header && !operation->payload.empty(), &taken));
      if (taken == 0) return {};
      *moved = true;
      operation->sent += taken;
    }
    stream->outgoing.pop_front();
    operation->stream = nullptr;
    operation->done = true;
    if (stream->is_control) delete operation;
  }
  return {};
}

Status Mesh::ReadAvailable(int peer, Stream* stream, bool* moved) {
  while (true) {
    if (stream->header_bytes < sizeof(Header)) {
      const auto header = std::as_writable_bytes(std::span(&stream->header, 1));
      size_t got = 0;
      BAGUA_RETURN_IF_ERROR(stream->pipe->Read(header.subspan(stream->header_bytes), &got));
      if (got == 0) return {};
      *moved = true;
      stream->header_bytes += got;
      if (stream->header_bytes < sizeof(Header)) continue;
      BAGUA_RETURN_IF_ERROR(BeginMessage(peer, stream));
    }
    while (stream->payload_bytes < stream->header.bytes) {
      std::span<std::byte> room;
      if (stream->target != nullptr) {
        room = stream->target->dst.subspan(stream->payload_bytes);
      } else {
        // Memory grows with what arrives, not with what a header promises.
        const size_t left = stream->header.bytes - stream->payload_bytes;
        stream->keep.resize(stream->payload_bytes + std::min(left, kKeepBlock));
        room = std::span(stream->keep).subspan(stream->payload_bytes);
      }
      size_t got = 0;
      BAGUA_RETURN_IF_ERROR(stream->pipe->Read(room, &got));
      if (got == 0) return {};
      *moved = true;
      stream->payload_bytes += got;
    }
    BAGUA_RETURN_IF_ERROR(EndMessage(peer, stream));
  }
}

Status Mesh::BeginMessage(int peer, Stream* stream) {
  const Header& header = stream->header;
  if (header.check != CheckOf(header) || (stream->is_control && header.bytes > kMaxControlBytes))
    return Status(StatusCode::kInternal, StrCat("rank ", peer, " sent a malformed message"));
  stream->payload_bytes = 0;
  stream->keep.clear();
  stream->target = nullptr;
  if (stream->is_control) return {};
  Stream::Channel& channel = stream->channels[header.channel];
  if (channel.posted.empty() || !channel.kept.empty()) return {};
  RecvOperation* const next = channel.posted.front();
  if (next->tag == TagOf(header) && next->dst.size() == header.bytes) stream->target = next;
  return {};
}

Status Mesh::EndMessage(int peer, Stream* stream) {
  const Header header = stream->header;
  stream->header_bytes = 0;
  RecvOperation* const target = std::exchange(stream->target, nullptr);
  const std::span<const std::byte> payload =
      target != nullptr ? std::span<const std::byte>(target->dst) : std::span(stream->keep);
  BAGUA_CHECK(payload.size() == header.bytes) << payload.size() << " vs " << header.bytes;
  if (stream->pipe->leaves_host() && Crc32c(payload) != header.crc)
    return Status(StatusCode::kInternal,
                  StrCat("the checksum of ", DescribeMessage(TagOf(header), header.bytes),
                         " from rank ", peer, " does not hold: data was damaged on the way"));
  if (stream->is_control) {
    control_.push_back({peer, std::exchange(stream->keep, {})});
    return {};
  }
  Stream::Channel& channel = stream->channels[header.channel];
  if (channel.posted.empty()) {
    channel.kept.push_back({TagOf(header), std::exchange(stream->keep, {})});
    return {};
  }
  RecvOperation* const next = channel.posted.front();
  if (target == nullptr) BAGUA_RETURN_IF_ERROR(Deliver(peer, next, TagOf(header), stream->keep));
  channel.posted.pop_front();
  next->stream = nullptr;
  next->done = true;
  return {};
}

bool Mesh::Flushed() const {
  for (const auto& peer : peers_)
    if (!peer->control.outgoing.empty() || !peer->data.outgoing.empty()) return false;
  return true;
}

bool Mesh::Ended(int peer) const {
  return peers_[peer]->control.pipe->ended() && peers_[peer]->data.pipe->ended();
}

void Mesh::CloseWrite() {
  for (const auto& peer : peers_) {
    if (peer->control.pipe) peer->control.pipe->CloseWrite();
    if (peer->data.pipe) peer->data.pipe->CloseWrite();
  }
}

std::vector<int> Mesh::Descriptors(int peer) const {
  std::vector<int> descriptors;
  for (const Stream* stream : {&peers_[peer]->control, &peers_[peer]->data})
    if (stream->pipe && stream->pipe->fd() >= 0) descriptors.push_back(stream->pipe->fd());
  return descriptors;
}

}  // namespace bagua
