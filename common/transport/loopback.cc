// Ranks that are threads of one process.
#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "common/base/check.h"
#include "common/transport/ring_memory.h"
#include "common/transport/wiring.h"

namespace bagua {
namespace {

// [a][b] is a's end of the socket to b.
std::vector<std::vector<UniqueFd>> MakeSocketPairs(int size) {
  std::vector<std::vector<UniqueFd>> ends(size);
  for (auto& of_rank : ends) of_rank.resize(size);
  for (int a = 0; a < size; ++a) {
    for (int b = a + 1; b < size; ++b) {
      int pair[2] = {-1, -1};
      const int made = ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair);
      BAGUA_CHECK(made == 0) << "socketpair: errno " << errno;
      ends[a][b] = UniqueFd(pair[0]);
      ends[b][a] = UniqueFd(pair[1]);
    }
  }
  return ends;
}

class RankMemories {
 public:
  explicit RankMemories(int size)
      : bytes_(RingMemory::Bytes(size)),
        data_(static_cast<std::byte*>(
            ::operator new(bytes_* static_cast<size_t>(size), kAlignment))) {
    std::fill_n(data_, bytes_ * static_cast<size_t>(size), std::byte{0});
  }
  ~RankMemories() { ::operator delete(data_, kAlignment); }
  RankMemories(const RankMemories&) = delete;
  RankMemories& operator=(const RankMemories&) = delete;
  RingMemory* of(int rank) const {
    return reinterpret_cast<RingMemory*>(data_ + bytes_ * static_cast<size_t>(rank));
  }

 private:
  static constexpr std::align_val_t kAlignment{alignof(RingPair)};
  const size_t bytes_;
  std::byte* const data_;
};

std::unique_ptr<Doorbell> CopyOf(const UniqueFd& event, RingMemory* memory) {
  return std::make_unique<Doorbell>(&memory->bell,
                                    UniqueFd(::fcntl(event.get(), F_DUPFD_CLOEXEC, 0)));
}

}  // namespace

std::vector<Wiring> MakeLoopbackWiring(int size) {
  std::vector<std::vector<UniqueFd>> sockets = MakeSocketPairs(size);
  auto memory = std::make_shared<RankMemories>(size);
  std::vector<UniqueFd> events;
  for (int r = 0; r < size; ++r) events.push_back(Doorbell::MakeEvent());
  std::vector<Wiring> all(size);
  for (int rank = 0; rank < size; ++rank) {
    Wiring& wiring = all[rank];
    wiring.rank = rank;
    wiring.memory = memory;
    wiring.bell = CopyOf(events[rank], memory->of(rank));
    std::vector<Lifelines::Peer> watched;
    for (int peer = 0; peer < size; ++peer) {
      Wiring::Peer link;
      link.name = StrCat("rank ", peer);
      if (peer != rank) {
        link.bell = CopyOf(events[peer], memory->of(peer));
        link.pipes =
            JoinRings(memory->of(rank), rank, memory->of(peer), peer, memory, link.bell.get());
      }
      wiring.peers.push_back(std::move(link));
      watched.push_back({std::move(sockets[rank][peer]), 0});
    }
    Doorbell* const bell = wiring.bell.get();
    wiring.lifelines = std::make_unique<Lifelines>(std::move(watched), [bell] { bell->Signal(); });
    const Status started = wiring.lifelines->Start();
    BAGUA_CHECK(started.ok()) << started.message();
  }
  return all;
}

std::vector<Membership> MakeLocalMemberships(int size) {
  std::vector<std::vector<UniqueFd>> sockets = MakeSocketPairs(size);
  std::vector<Membership> all(size);
  for (int rank = 0; rank < size; ++rank) {
    for (int peer = 0; peer < size; ++peer) {
      Member member;
      member.rank = peer;
      member.pid = ::getpid();
      member.host_id = "this process";
      all[rank].members.push_back(member);
      PeerLink link;
      link.local = true;
      link.lifeline = std::move(sockets[rank][peer]);
      all[rank].links.push_back(std::move(link));
    }
  }
  return all;
}

}  // namespace bagua
