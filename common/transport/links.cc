#include "common/transport/links.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace bagua {
namespace {

constexpr std::chrono::milliseconds kLongestPause{500};
constexpr size_t kSpareGuests = 64;
constexpr Purpose kLocalPurposes[] = {Purpose::kLifeline};
constexpr Purpose kRemotePurposes[] = {Purpose::kLifeline, Purpose::kControl, Purpose::kData};

std::span<const Purpose> PurposesOf(bool local) {
  return local ? std::span<const Purpose>(kLocalPurposes) : kRemotePurposes;
}

Result<SocketAddress> AddressOf(const Member& member, bool local) {
  if (local) return UnixAddress(member.unix_name);
  Result<HostPort> where = ParseHostPort(member.address);
  if (!where.ok()) return where.status();
  Result<std::vector<SocketAddress>> addresses = Resolve(where.value());
  if (!addresses.ok()) return addresses.status();
  return addresses.value().front();
}

bool OnlyItsHostReaches(const Member& member) {
  Result<SocketAddress> address = AddressOf(member, false);
  return address.ok() && address.value().IsLoopback();
}

int PidOf(int unix_socket) {
  ucred credentials{};
  socklen_t bytes = sizeof(credentials);
  if (::getsockopt(unix_socket, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) return 0;
  return credentials.pid;
}

}  // namespace

bool Connects(const Member& a, const Member& b, bool local) {
  if (!local) {
    const bool a_hidden = OnlyItsHostReaches(a);
    if (a_hidden != OnlyItsHostReaches(b)) return a_hidden;
  }
  return a.rank > b.rank;
}

LinkBuilder::LinkBuilder(int rank, RoundTable table, bool tcp_everywhere, Bytes secret,
                         Listeners listeners)
    : rank_(rank),
      tcp_everywhere_(tcp_everywhere),
      secret_(std::move(secret)),
      round_(table.round),
      listeners_(std::move(listeners)) {
  membership_.members = std::move(table.members);
  membership_.links.resize(membership_.members.size());
}

bool LinkBuilder::IsLocal(int peer) const {
  const auto& members = membership_.members;
  return !tcp_everywhere_ && members[peer].host_id == members[rank_].host_id;
}

Status LinkBuilder::Start() {
  const int size = static_cast<int>(membership_.members.size());
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank_) continue;
    const bool local = IsLocal(peer);
    membership_.links[peer].local = local;
    missing_ += PurposesOf(local).size();
    const Member& member = membership_.members[peer];
    if (!Connects(membership_.members[rank_], member, local)) continue;
    Result<SocketAddress> address = AddressOf(member, local);
    if (!address.ok()) return address.status().WithContext(StrCat("rank ", peer));
    for (const Purpose purpose : PurposesOf(local)) {
      Attempt& attempt = attempts_.emplace_back();
      attempt.peer = peer;
      attempt.purpose = purpose;
      attempt.address = address.value();
      attempt.time = Clock::now();
    }
  }
  return {};
}

void LinkBuilder::AddInterest(std::vector<pollfd>* interest) {
  first_slot_ = interest->size();
  interest->push_back({listeners_.tcp.get(), POLLIN, 0});
  interest->push_back({listeners_.local.get(), POLLIN, 0});
  for (Attempt& attempt : attempts_) {
    if (!attempt.fd.valid()) continue;
    attempt.slot = interest->size();
    const short events = attempt.handshake ? attempt.handshake->events() : short{POLLOUT};
    interest->push_back({attempt.fd.get(), events, 0});
  }
  for (Guest& guest : guests_) {
    guest.slot = interest->size();
    interest->push_back({guest.fd.get(), guest.handshake.events(), 0});
  }
}

Status LinkBuilder::Progress(const std::vector<pollfd>& polled) {
  const Deadline now = Clock::now();
  for (Attempt& attempt : attempts_) {
    Status status;
    if (!attempt.fd.valid()) {
      if (now >= attempt.time) status = Begin(&attempt);
    } else if (polled[attempt.slot].revents != 0) {
      status = Advance(&attempt);
    } else if (now >= attempt.time) {
      status = Status(StatusCode::kPeerLost, "no answer");
    }
    if (status.code() == StatusCode::kInvalidArgument)
      return status.WithContext(
          StrCat("connecting to rank ", attempt.peer, " at ", ToText(attempt.address)));
    if (!status.ok()) TryLater(&attempt, status);
  }
  std::erase_if(attempts_, [](const Attempt& attempt) { return attempt.done; });
  std::erase_if(guests_, [&](Guest& guest) {
    if (polled[guest.slot].revents != 0) return !Advance(&guest);
    return now >= guest.until;
  });
  if (polled[first_slot_].revents != 0)
    BAGUA_RETURN_IF_ERROR(AcceptFrom(listeners_.tcp.get(), false));
  if (polled[first_slot_ + 1].revents != 0)
    BAGUA_RETURN_IF_ERROR(AcceptFrom(listeners_.local.get(), true));
  return {};
}

Deadline LinkBuilder::next_time() const {
  Deadline next = kForever;
  for (const Attempt& attempt : attempts_) next = std::min(next, attempt.time);
  for (const Guest& guest : guests_) next = std::min(next, guest.until);
  return next;
}

Status LinkBuilder::Begin(Attempt* attempt) {
  Result<UniqueFd> fd = StartConnect(attempt->address);
  if (!fd.ok()) return fd.status();
  attempt->fd = std::move(fd).value();
  attempt->time = Clock::now() + kHandshakePatience;
  return {};
}

Status LinkBuilder::Advance(Attempt* attempt) {
  if (!attempt->handshake) {
    BAGUA_RETURN_IF_ERROR(FinishConnect(attempt->fd.get(), attempt->address));
    Result<Handshake> handshake =
        Handshake::Connect(secret_, round_, attempt->purpose, rank_, attempt->peer);
    if (!handshake.ok()) return handshake.status();
    attempt->handshake.emplace(std::move(handshake).value());
  }
  BAGUA_RETURN_IF_ERROR(attempt->handshake->Advance(attempt->fd.get()));
  if (!attempt->handshake->done()) return {};
  attempt->done = true;
  Keep(attempt->peer, attempt->purpose, std::move(attempt->fd));
  return {};
}

void LinkBuilder::TryLater(Attempt* attempt, const Status& failure) {
  attempt->fd.Reset();
  attempt->handshake.reset();
  attempt->last_failure = failure.message();
  attempt->time = Clock::now() + attempt->pause;
  attempt->pause = std::min(attempt->pause * 2, kLongestPause);
}

Status LinkBuilder::AcceptFrom(int listener, bool local) {
  while (true) {
    UniqueFd fd = bagua::AcceptFrom(listener);
    if (!fd.valid() && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (!fd.valid() && (errno == EMFILE || errno == ENFILE)) {
      if (guests_.empty())
        return ErrnoStatus("accepting the other ranks' connections (see ulimit -n)", errno);
      guests_.pop_front();
      continue;
    }
    if (!fd.valid()) return {};
    // Strangers may not keep out those that are awaited, who try again when dropped.
    if (guests_.size() >= missing_ + kSpareGuests) guests_.pop_front();
    Result<Handshake> handshake = Handshake::Accept(secret_, round_, rank_);
    if (!handshake.ok()) return handshake.status();
    guests_.push_back(
        {std::move(fd), std::move(handshake).value(), Clock::now() + kHandshakePatience, local, 0});
  }
}

bool LinkBuilder::Advance(Guest* guest) {
  if (!guest->handshake.Advance(guest->fd.get()).ok()) return false;
  if (!guest->handshake.done()) return true;
  if (Awaits(*guest))
    Keep(guest->handshake.peer_rank(), guest->handshake.purpose(), std::move(guest->fd));
  return false;
}

bool LinkBuilder::Awaits(const Guest& guest) const {
  const int peer = guest.handshake.peer_rank();
  const int size = static_cast<int>(membership_.members.size());
  if (peer < 0 || peer >= size || peer == rank_ || guest.local != IsLocal(peer)) return false;
  const auto purposes = PurposesOf(guest.local);
  return std::ranges::find(purposes, guest.handshake.purpose()) != purposes.end() &&
         Connects(membership_.members[peer], membership_.members[rank_], guest.local);
}

UniqueFd& LinkBuilder::Place(int peer, Purpose purpose) {
  PeerLink& link = membership_.links[peer];
  if (purpose == Purpose::kControl) return link.control;
  return purpose == Purpose::kData ? link.data : link.lifeline;
}

void LinkBuilder::Keep(int peer, Purpose purpose, UniqueFd fd) {
  const bool local = membership_.links[peer].local;
  if (local) {
    membership_.members[peer].pid = PidOf(fd.get());
  } else {
    SetNoDelay(fd.get());
    if (purpose == Purpose::kLifeline) SetHeartbeat(fd.get());
  }
  UniqueFd& place = Place(peer, purpose);
  // A peer that connects twice has given the first connection up.
  if (!place.valid()) --missing_;
  place = std::move(fd);
}

std::string LinkBuilder::DescribeMissing() const {
  constexpr size_t kNamed = 8;
  std::vector<std::string> parts;
  for (int peer = 0; peer < static_cast<int>(membership_.links.size()); ++peer) {
    const PeerLink& link = membership_.links[peer];
    const bool stands =
        link.lifeline.valid() && (link.local || (link.control.valid() && link.data.valid()));
    if (peer == rank_ || stands) continue;
    const auto attempt = std::ranges::find(attempts_, peer, &Attempt::peer);
    parts.push_back(attempt == attempts_.end()
                        ? StrCat("rank ", peer, " (has not connected)")
                        : StrCat("rank ", peer, " at ", ToText(attempt->address), " (",
                                 attempt->last_failure, ")"));
  }
  std::string text;
  for (size_t i = 0; i < std::min(parts.size(), kNamed); ++i)
    text += StrCat(i > 0 ? ", " : "", parts[i]);
  if (parts.size() > kNamed) text += StrCat(" and ", parts.size() - kNamed, " more");
  return text;
}

Membership LinkBuilder::Take() {
  return std::move(membership_);
}

}  // namespace bagua
