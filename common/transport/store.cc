#include "common/transport/store.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/clock.h"
#include "common/base/thread.h"
#include "common/transport/handshake.h"
#include "common/transport/socket.h"
#include "common/transport/store_channel.h"

namespace bagua {
namespace {

constexpr uint64_t kListenerWord = 0;
constexpr uint64_t kWakeWord = 1;
constexpr uint64_t kFirstCaller = 2;
constexpr int kAcceptedAtOnce = 64;
constexpr int kSpareStrangers = 64;
// Listening pauses for so long when descriptors or memory are used up.
constexpr std::chrono::milliseconds kBreath{100};
// A rank that gives up while connecting says why; the store's own, poorer word comes after it.
constexpr std::chrono::seconds kPrecedence{1};

enum class Stage {
  kStranger,   // has not proved itself
  kProved,     // has not reported
  kWaiting,    // member of the round
  kConnected,  // member of the round, connected to every other
  kEnding,     // told how the round ended; closes the connection itself
};

struct Caller {
  Caller(uint64_t number, UniqueFd socket)
      : id(number), channel(std::move(socket), kMaxReportBytes) {}
  bool in_round() const { return stage == Stage::kWaiting || stage == Stage::kConnected; }
  int rank() const { return report.member.rank; }

  const uint64_t id;
  StoreChannel channel;
  std::string address;
  std::optional<Handshake> handshake;
  Stage stage = Stage::kStranger;
  Deadline until = kForever;  // when it is closed, or when the round fails for want of others
  Report report;
};

class Store final : public StoreServer {
 public:
  Store(UniqueFd listener, int size, Bytes secret)
      : size_(size), secret_(std::move(secret)), listener_(std::move(listener)) {}
  ~Store() override;
  Status Run();
  int port() const override { return LocalAddress(listener_.get()).port(); }
  void ReportLost(int rank, const std::string& why) override;
  void CloseInChild() override;

 private:
  using Callers = std::map<uint64_t, Caller>;

  void Serve();
  void Wake();
  void Watch(int operation, int fd, uint32_t events, uint64_t word);
  void WatchListener(bool on);
  int TimeoutMs() const;
  void Accept();
  bool Admit(UniqueFd socket);
  bool DropOldestStranger();
  void OnCaller(uint64_t id);
  void Greet(Callers::iterator caller);
  void Converse(Callers::iterator caller);
  Status OnMessage(Caller* caller, const StoreMessage& message);
  Status OnReport(Caller* caller, const StoreMessage& message);
  void OnGivenUp(Caller* caller, const Status& why);
  void OpenRound();
  void CompleteRound();
  void FailRound(const Status& why, std::optional<int> cause = std::nullopt);
  void Tell(Caller* caller, const Status& failure);
  void Say(Caller* caller, StoreWord word, const Bytes& payload = {});
  static void End(Caller* caller);
  void Lose(Callers::iterator caller, const std::string& how);
  void Close(Callers::iterator caller);
  void TakeLosses();
  void Expire();
  void Farewell();
  Status TimedOut(const Caller& impatient) const;
  int Count(Stage stage) const;
  // Every rank has the table.
  bool IsOpen() const { return Count(Stage::kWaiting) + Count(Stage::kConnected) == size_; }

  const int size_;
  const Bytes secret_;
  UniqueFd listener_;
  UniqueFd epoll_;
  UniqueFd wake_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::vector<std::pair<int, std::string>> reported_;  // guarded by mutex_

  // The rest belongs to the thread.
  Callers callers_;  // by number, in the order in which they came
  uint64_t next_caller_ = kFirstCaller;
  Deadline listen_again_ = kForever;
  Status lost_;           // by report of the launcher; no round can be complete any more
  Status failure_;        // of the last round, while there are ranks to be told
  std::set<int> told_;    // who knows of failure_
  std::string rejected_;  // hint: a caller that did not prove itself
};

Status Store::Run() {
  epoll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
  wake_ = UniqueFd(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!epoll_.valid() || !wake_.valid()) return ErrnoStatus("starting the rendezvous store", errno);
  Watch(EPOLL_CTL_ADD, wake_.get(), EPOLLIN, kWakeWord);
  WatchListener(true);
  thread_ = StartThread("bagua-store", [this] { Serve(); });
  return {};
}

Store::~Store() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_release);
  Wake();
  thread_.join();
}

void Store::CloseInChild() {
  listener_.Reset();
  epoll_.Reset();
  wake_.Reset();
  // The thread, which exists in the parent alone, may have been changing the callers: their sockets
  // cannot be found safely and stay.
}

void Store::ReportLost(int rank, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    reported_.emplace_back(rank, why);
  }
  Wake();
}

void Store::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

void Store::Watch(int operation, int fd, uint32_t events, uint64_t word) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = word;
  ::epoll_ctl(epoll_.get(), operation, fd, &event);
}

void Store::WatchListener(bool on) {
  Watch(on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, listener_.get(), EPOLLIN, kListenerWord);
  listen_again_ = on ? kForever : Clock::now() + kBreath;
}

void Store::Serve() {
  while (!stopping_.load(std::memory_order_acquire)) {
    epoll_event events[64];
    const int count = ::epoll_wait(epoll_.get(), events, 64, TimeoutMs());
    for (int i = 0; i < count; ++i) {
      const uint64_t word = events[i].data.u64;
      if (word == kListenerWord) Accept();
      if (word >= kFirstCaller) OnCaller(word);
    }
    uint64_t signals = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &signals, sizeof(signals));
    TakeLosses();
    Expire();
  }
  Farewell();
}

int Store::TimeoutMs() const {
  Deadline next = listen_again_;
  for (const auto& [id, caller] : callers_) next = std::min(next, caller.until);
  if (next == kForever) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

void Store::Accept() {
  for (int accepted = 0; accepted < kAcceptedAtOnce; ++accepted) {
    UniqueFd socket = AcceptFrom(listener_.get());
    if (socket.valid()) {
      if (!Admit(std::move(socket))) return;
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    const bool used_up = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    if (used_up && !DropOldestStranger()) WatchListener(false);
    if (!used_up) return;
    if (listen_again_ != kForever) return;
  }
}

bool Store::Admit(UniqueFd socket) {
  if (Count(Stage::kStranger) >= 2 * size_ + kSpareStrangers) DropOldestStranger();
  Result<Handshake> handshake = Handshake::Accept(secret_, RoundId{}, kStoreRank);
  if (!handshake.ok()) return false;
  SetNoDelay(socket.get());
  SetHeartbeat(socket.get());
  const uint64_t id = next_caller_++;
  Caller& caller = callers_.try_emplace(id, id, std::move(socket)).first->second;
  caller.address = ToText(PeerAddress(caller.channel.fd()));
  caller.handshake.emplace(std::move(handshake).value());
  caller.until = Clock::now() + kHandshakePatience;
  Watch(EPOLL_CTL_ADD, caller.channel.fd(), EPOLLIN, id);
  return true;
}

bool Store::DropOldestStranger() {
  const auto oldest = std::ranges::find_if(
      callers_, [](const auto& entry) { return entry.second.stage == Stage::kStranger; });
  if (oldest == callers_.end()) return false;
  Close(oldest);
  return true;
}

void Store::OnCaller(uint64_t id) {
  const auto caller = callers_.find(id);
  if (caller == callers_.end()) return;
  if (caller->second.stage == Stage::kStranger) return Greet(caller);
  Converse(caller);
}

void Store::Greet(Callers::iterator caller) {
  Caller& c = caller->second;
  const Status status = c.handshake->Advance(c.channel.fd());
  const bool done = c.handshake->done();
  if (!status.ok() || (done && c.handshake->purpose() != Purpose::kStore)) {
    // What it says of itself is not proved: good for a hint alone.
    if (c.handshake->met())
      rejected_ = StrCat(" (a connection from ", c.address, " as rank ", c.handshake->peer_rank(),
                         " did not pass the handshake)");
    return Close(caller);
  }
  if (done) {
    c.report.member.rank = c.handshake->peer_rank();
    c.handshake.reset();
    c.stage = Stage::kProved;
    c.until = Clock::now() + kHandshakePatience;
  }
  const bool writes = !done && (c.handshake->events() & EPOLLOUT) != 0;
  Watch(EPOLL_CTL_MOD, c.channel.fd(), writes ? EPOLLOUT : EPOLLIN, caller->first);
}

void Store::Converse(Callers::iterator caller) {
  Caller& c = caller->second;
  Status ended = c.channel.Receive();
  while (std::optional<StoreMessage> message = c.channel.Take()) {
    if (c.stage == Stage::kEnding) continue;
    if (Status wrong = OnMessage(&c, *message); !wrong.ok()) ended = wrong;
  }
  if (!ended.ok()) return Lose(caller, ended.message());
  c.channel.Flush();
  Watch(EPOLL_CTL_MOD, c.channel.fd(), static_cast<uint32_t>(c.channel.events()), caller->first);
}

Status Store::OnMessage(Caller* caller, const StoreMessage& message) {
  if (message.word == StoreWord::kReport && caller->stage == Stage::kProved)
    return OnReport(caller, message);
  if (message.word == StoreWord::kFailed) {
    OnGivenUp(caller, DecodeFailure(message.payload));
    return {};
  }
  if (message.word == StoreWord::kConnected && caller->stage == Stage::kWaiting && IsOpen()) {
    caller->stage = Stage::kConnected;
    if (Count(Stage::kConnected) == size_) CompleteRound();
    return {};
  }
  return Status(StatusCode::kInternal, "it sent a message out of place");
}

Status Store::OnReport(Caller* caller, const StoreMessage& message) {
  const int rank = caller->rank();
  Result<Report> report = DecodeReport(message.payload);
  if (!report.ok()) return report.status();
  caller->report = std::move(report).value();
  caller->report.member.rank = rank;
  if (!failure_.ok() && lost_.ok()) {
    if (told_.insert(rank).second) {
      Tell(caller, failure_);
      return {};
    }
    failure_ = {};
    told_.clear();
  }
  std::vector<const Report*> members;
  for (const auto& [id, other] : callers_)
    if (other.in_round()) members.push_back(&other.report);
  const Status wrong = lost_.ok() ? CheckReport(caller->report, members, size_) : lost_;
  caller->stage = Stage::kWaiting;
  caller->until = After(Seconds(caller->report.patience_seconds));
  if (!wrong.ok()) {
    FailRound(wrong);
  } else if (Count(Stage::kWaiting) == size_) {
    OpenRound();
  }
  return {};
}

void Store::OnGivenUp(Caller* caller, const Status& why) {
  const std::string who = Describe(caller->report.member);
  End(caller);
  FailRound(why.code() == StatusCode::kAborted
                ? Status(StatusCode::kPeerLost, StrCat("lost ", who, ": ", why.message()))
                : why.WithContext(who),
            caller->rank());
}

void Store::OpenRound() {
  RoundTable table;
  if (const Status random = FillRandom(table.round); !random.ok()) return FailRound(random);
  table.members.resize(static_cast<size_t>(size_));
  for (const auto& [id, caller] : callers_)
    if (caller.in_round()) table.members[static_cast<size_t>(caller.rank())] = caller.report.member;
  const Bytes encoded = Encode(table);
  for (auto& [id, caller] : callers_) {
    if (!caller.in_round()) continue;
    Say(&caller, StoreWord::kTable, encoded);
    if (caller.until != kForever) caller.until += kPrecedence;
  }
}

void Store::CompleteRound() {
  for (auto& [id, caller] : callers_) {
    if (!caller.in_round()) continue;
    Say(&caller, StoreWord::kComplete);
    End(&caller);
  }
  rejected_.clear();
}

void Store::FailRound(const Status& why, std::optional<int> cause) {
  failure_ = why;
  told_.clear();
  if (cause) told_.insert(*cause);
  for (auto& [id, caller] : callers_) {
    if (!caller.in_round()) continue;
    told_.insert(caller.rank());
    Tell(&caller, why);
  }
  rejected_.clear();
}

void Store::Tell(Caller* caller, const Status& failure) {
  Say(caller, StoreWord::kFailed, EncodeFailure(failure));
  End(caller);
}

void Store::Say(Caller* caller, StoreWord word, const Bytes& payload) {
  caller->channel.Post(word, payload);
  Watch(EPOLL_CTL_MOD, caller->channel.fd(), static_cast<uint32_t>(caller->channel.events()),
        caller->id);
}

// The caller closes the connection, so that what it was told cannot be lost.
void Store::End(Caller* caller) {
  caller->stage = Stage::kEnding;
  caller->until = Clock::now() + kHandshakePatience;
}

void Store::Lose(Callers::iterator caller, const std::string& how) {
  const bool matters = caller->second.stage == Stage::kProved || caller->second.in_round();
  const Member member = caller->second.report.member;
  Close(caller);
  if (!matters) return;
  FailRound(Status(StatusCode::kPeerLost,
                   StrCat("lost ", Describe(member), " before all ranks were connected: ", how)),
            member.rank);
}

// A child that this process forks may hold the socket: closing alone would neither tell the caller
// nor end its events.
void Store::Close(Callers::iterator caller) {
  const int fd = caller->second.channel.fd();
  Watch(EPOLL_CTL_DEL, fd, 0, caller->first);
  ::shutdown(fd, SHUT_RDWR);
  callers_.erase(caller);
}

void Store::TakeLosses() {
  std::vector<std::pair<int, std::string>> reported;
  {
    std::lock_guard lock(mutex_);
    reported.swap(reported_);
  }
  for (const auto& [rank, why] : reported) {
    if (rank < 0 || rank >= size_) continue;
    if (lost_.ok())
      lost_ = Status(StatusCode::kPeerLost,
                     StrCat("lost rank ", rank, ": it ", why, " before all ranks were connected"));
  }
  if (!lost_.ok() && Count(Stage::kWaiting) + Count(Stage::kConnected) > 0) FailRound(lost_);
}

void Store::Expire() {
  const Deadline now = Clock::now();
  if (now >= listen_again_) WatchListener(true);
  for (auto at = callers_.begin(); at != callers_.end();) {
    const auto caller = at++;
    if (now < caller->second.until) continue;
    if (caller->second.in_round()) {
      FailRound(TimedOut(caller->second));
    } else if (caller->second.stage == Stage::kProved) {
      Lose(caller, "it did not report");
    } else {
      Close(caller);
    }
  }
}

Status Store::TimedOut(const Caller& impatient) const {
  const bool open = IsOpen();
  std::set<int> there;
  for (const auto& [id, caller] : callers_)
    if (caller.stage == Stage::kConnected || (!open && caller.stage == Stage::kWaiting))
      there.insert(caller.rank());
  std::vector<int> missing;
  for (int rank = 0; rank < size_; ++rank)
    if (!there.contains(rank)) missing.push_back(rank);
  return Status(StatusCode::kTimeout,
                StrCat("waited ", ToTenths(impatient.report.patience_seconds), " s for ",
                       DescribeRanks(missing),
                       open ? ", not connected to every other rank" : ", which never came",
                       rejected_, ". Set BAGUA_START_TIMEOUT_SECONDS to wait longer"));
}

void Store::Farewell() {
  // A rank of this process may have said why it gives up and end the store in the same breath.
  std::vector<uint64_t> ids;
  for (const auto& [id, caller] : callers_) ids.push_back(id);
  for (const uint64_t id : ids) OnCaller(id);
  FailRound(Status(StatusCode::kPeerLost,
                   "lost the rendezvous store: the process that serves it (bagua-run, or rank 0 "
                   "without it) ended it before all ranks were connected"));
  callers_.clear();
}

int Store::Count(Stage stage) const {
  return static_cast<int>(std::ranges::count_if(
      callers_, [stage](const auto& entry) { return entry.second.stage == stage; }));
}

}  // namespace

Result<std::unique_ptr<StoreServer>> StoreServer::Start(const std::string& host, int port, int size,
                                                        Bytes secret) {
  if (size < 1 || port < 0 || port > 65535)
    return Status(StatusCode::kInvalidArgument,
                  StrCat("a rendezvous store for ", size, " ranks at port ", port,
                         " cannot be; give a size of at least 1 and a port up to 65535"));
  if (size > 1) BAGUA_RETURN_IF_ERROR(CheckSecret(secret));
  Result<UniqueFd> listener = Listen(HostPort{host, port});
  if (!listener.ok()) return listener.status();
  auto store = std::make_unique<Store>(std::move(listener).value(), size, std::move(secret));
  BAGUA_RETURN_IF_ERROR(store->Run());
  return std::unique_ptr<StoreServer>(std::move(store));
}

}  // namespace bagua
