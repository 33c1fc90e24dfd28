#include "common/transport/wiring.h"

#include <poll.h>

#include <algorithm>
#include <map>
#include <utility>

#include "common/transport/ring_memory.h"
#include "common/transport/segment.h"
#include "common/transport/tcp_pipe.h"

namespace bagua {
namespace {

std::string DescribeMember(const Member& member) {
  // Of a derived id users know the host's name, which stands first.
  const std::string host = member.host_id.substr(0, member.host_id.find('/'));
  return StrCat("rank ", member.rank, " on host ", host, " (pid ", member.pid,
                member.framework.empty() ? "" : ", ", member.framework, ")");
}

// The ranks of this host that share memory, this one included.
struct HostPlace {
  std::vector<int> ranks;
  int place = 0;
};

HostPlace FindHost(int rank, const Membership& membership) {
  HostPlace host;
  for (int r = 0; r < static_cast<int>(membership.links.size()); ++r) {
    if (r != rank && !membership.links[r].local) continue;
    if (r == rank) host.place = static_cast<int>(host.ranks.size());
    host.ranks.push_back(r);
  }
  return host;
}

std::unique_ptr<Lifelines> TakeLifelines(int rank, Membership* membership, Doorbell* bell) {
  std::vector<Lifelines::Peer> peers;
  for (int r = 0; r < static_cast<int>(membership->links.size()); ++r) {
    PeerLink& link = membership->links[r];
    const int pid = membership->members[r].pid;
    const bool watched = r != rank && link.local && pid != ::getpid();
    peers.push_back({std::move(link.lifeline), watched ? pid : 0});
  }
  return std::make_unique<Lifelines>(std::move(peers), [bell] { bell->Signal(); });
}

// Segments of several ranks that live as long as any pipe over them.
struct SharedSegments {
  std::vector<std::shared_ptr<Segment>> segments;  // own one first
};

RingMemory* MemoryOf(const Segment& segment) {
  return reinterpret_cast<RingMemory*>(segment.data());
}

Status AwaitDescriptor(Wiring* wiring, int peer, SegmentKind kind, Deadline deadline,
                       UniqueFd* fd) {
  while (true) {
    *fd = wiring->lifelines->TakeSegment(peer, SegmentId(kind, 0));
    if (fd->valid()) return {};
    for (const PeerEvent& event : wiring->lifelines->TakeEvents())
      return Status(StatusCode::kPeerLost,
                    StrCat(wiring->peers[event.peer].name, " was lost while connecting: ",
                           event.kind == PeerEvent::Kind::kLeft ? "it left the job"
                                                                : event.status.message()));
    const Deadline now = Clock::now();
    if (now >= deadline)
      return Status(StatusCode::kTimeout,
                    StrCat("waited for the shared memory of ", wiring->peers[peer].name));
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(
        std::min<Clock::duration>(deadline - now, std::chrono::seconds(60)));
    pollfd event{wiring->bell->fd(), POLLIN, 0};
    ::poll(&event, 1, static_cast<int>(left.count()));
    wiring->bell->Drain();
  }
}

Status ConnectLocal(const HostPlace& host, SharedSegments* memory, Wiring* wiring,
                    Deadline deadline) {
  const int ranks = static_cast<int>(host.ranks.size());
  const std::shared_ptr<Segment> own = memory->segments[0];
  for (const int peer : host.ranks) {
    if (peer == wiring->rank) continue;
    Lifelines& lifelines = *wiring->lifelines;
    BAGUA_RETURN_IF_ERROR(lifelines.SendSegment(peer, SegmentId(kWiringSegment, 0), own->fd()));
    BAGUA_RETURN_IF_ERROR(
        lifelines.SendSegment(peer, SegmentId(kBellEvent, 0), wiring->bell->fd()));
  }
  for (int place = 0; place < ranks; ++place) {
    const int peer = host.ranks[place];
    if (peer == wiring->rank) continue;
    UniqueFd file;
    UniqueFd event;
    BAGUA_RETURN_IF_ERROR(AwaitDescriptor(wiring, peer, kWiringSegment, deadline, &file));
    BAGUA_RETURN_IF_ERROR(AwaitDescriptor(wiring, peer, kBellEvent, deadline, &event));
    Result<std::shared_ptr<Segment>> segment = Segment::Map(std::move(file), own->bytes());
    if (!segment.ok()) return segment.status();
    memory->segments.push_back(segment.value());
    RingMemory* const theirs = MemoryOf(*segment.value());
    Wiring::Peer& link = wiring->peers[peer];
    link.bell = std::make_unique<Doorbell>(&theirs->bell, std::move(event));
    link.pipes =
        JoinRings(MemoryOf(*own), host.place, theirs, place, wiring->memory, link.bell.get());
  }
  return {};
}

}  // namespace

Result<Wiring> ConnectWiring(int rank, Membership membership, Deadline deadline) {
  Wiring wiring;
  wiring.rank = rank;
  const HostPlace host = FindHost(rank, membership);
  Result<std::shared_ptr<Segment>> own =
      Segment::Create(RingMemory::Bytes(static_cast<int>(host.ranks.size())));
  if (!own.ok()) return own.status();
  auto memory = std::make_shared<SharedSegments>();
  memory->segments.push_back(own.value());
  wiring.memory = memory;
  wiring.bell = std::make_unique<Doorbell>(&MemoryOf(*own.value())->bell, Doorbell::MakeEvent());
  std::map<std::string, int> hosts;
  for (const Member& member : membership.members) {
    Wiring::Peer peer;
    peer.name = DescribeMember(member);
    peer.host = hosts.emplace(member.host_id, static_cast<int>(hosts.size())).first->second;
    peer.shares = member.rank == rank || membership.links[member.rank].local;
    wiring.peers.push_back(std::move(peer));
  }
  wiring.lifelines = TakeLifelines(rank, &membership, wiring.bell.get());
  Status status = wiring.lifelines->Start();
  if (status.ok()) status = ConnectLocal(host, memory.get(), &wiring, deadline);
  if (!status.ok()) return status;
  for (int peer = 0; peer < wiring.size(); ++peer) {
    if (wiring.peers[peer].shares) continue;
    wiring.peers[peer].pipes = {MakeTcpPipe(std::move(membership.links[peer].control)),
                                MakeTcpPipe(std::move(membership.links[peer].data))};
  }
  return wiring;
}

}  // namespace bagua
