// What a rank and the rendezvous store say to each other after the handshake: frames of a length, a
// word and a payload. Both sides bound what they take in before they take memory for it.
#ifndef BAGUA_COMMON_TRANSPORT_STORE_CHANNEL_H_
#define BAGUA_COMMON_TRANSPORT_STORE_CHANNEL_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/wire.h"
#include "common/transport/bootstrap.h"
#include "common/transport/handshake.h"

namespace bagua {

// A round, in the order in which it is said. Values travel on the wire.
enum class StoreWord : uint8_t {
  kReport = 1,     // rank: a Report; it listens and waits for the table
  kTable = 2,      // store: a RoundTable, once every rank has reported
  kConnected = 3,  // rank: connected to every other
  kComplete = 4,   // store: so is every rank
  kFailed = 5,     // either, at any time: the round failed; a Status
};

struct StoreMessage {
  StoreWord word;
  Bytes payload;
};

struct Report {
  int size = 0;                  // of the job, as this rank was told
  double patience_seconds = -1;  // until this rank gives up; negative: never
  bool tcp_everywhere = false;
  Member member;  // its rank is the one of the handshake and does not travel
};

struct RoundTable {
  RoundId round{};
  std::vector<Member> members;  // by rank
};

// Largest payload of a rank's message; the table's is as much for each rank.
inline constexpr size_t kMaxReportBytes = size_t{16} << 10;

Bytes Encode(const Report& report);
Bytes Encode(const RoundTable& table);
Bytes EncodeFailure(const Status& failure);
// kInternal for bytes that no encoding gives.
Result<Report> DecodeReport(std::span<const std::byte> bytes);
Result<RoundTable> DecodeTable(std::span<const std::byte> bytes);
// The failure told; kInternal when it is none.
Status DecodeFailure(std::span<const std::byte> bytes);

// kInvalidArgument, naming both values, if a round of `size` ranks with `members` cannot have
// `comer` too: another size or transport, no such rank, or a rank given twice.
Status CheckReport(const Report& comer, const std::vector<const Report*>& members, int size);

// For messages: "rank 3 (pid 10 on host node1)", of a member that has not reported "rank 3".
std::string Describe(const Member& member);
// "rank 3"; "ranks 3, 7"; after 16 names "and 5 more".
std::string DescribeRanks(const std::vector<int>& ranks);
// Rounded to one decimal.
double ToTenths(double seconds);

// Frames over a non-blocking socket. Thread-safety: one thread at a time.
class StoreChannel {
 public:
  // Payloads past `max_payload_bytes` end the channel.
  StoreChannel(UniqueFd socket, size_t max_payload_bytes)
      : socket_(std::move(socket)), max_payload_bytes_(max_payload_bytes) {}

  // Queues a message and writes what the socket takes now. A broken connection is told by Receive.
  void Post(StoreWord word, const Bytes& payload = {});
  void Flush();
  // Takes in what has arrived. Non-OK: the connection ended (kPeerLost) or carries something else
  // (kInternal); what arrived before can still be taken.
  Status Receive();
  std::optional<StoreMessage> Take();

  // POLLIN, and POLLOUT while something waits to be written.
  short events() const;
  int fd() const { return socket_.get(); }

 private:
  Status Split();

  UniqueFd socket_;
  size_t max_payload_bytes_;
  Bytes outgoing_;
  size_t sent_ = 0;
  Bytes incoming_;
  std::deque<StoreMessage> messages_;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_STORE_CHANNEL_H_
