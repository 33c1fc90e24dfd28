#include "common/transport/bootstrap.h"

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <optional>
#include <utility>

#include "common/base/crypto.h"
#include "common/transport/handshake.h"
#include "common/transport/links.h"
#include "common/transport/socket.h"
#include "common/transport/store_channel.h"

namespace bagua {
namespace {

constexpr std::chrono::milliseconds kFirstPause{10};
constexpr std::chrono::milliseconds kLongestPause{500};
// A name may become known a little after the rank's start (pods of a cluster); a wrong one never.
constexpr std::chrono::seconds kNamePatience{10};
// The store knows better than a rank why the time was not enough; it is given so long to tell.
constexpr std::chrono::seconds kVerdictPatience{3};
constexpr size_t kMaxNameBytes = 4096;

Status Validate(const BootstrapOptions& options) {
  const auto wrong = [](std::string text) {
    return Status(StatusCode::kInvalidArgument, std::move(text));
  };
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size)
    return wrong(StrCat("rank ", options.rank, " of size ", options.size,
                        " cannot be; ranks are 0 to size - 1"));
  if (options.size == 1) return {};
  if (options.self.host_id.size() + options.self.framework.size() > kMaxNameBytes)
    return wrong(StrCat("host id and framework take ",
                        options.self.host_id.size() + options.self.framework.size(),
                        " bytes, at most ", kMaxNameBytes, " are allowed"));
  return CheckSecret(options.secret);
}

Membership Alone(const Member& self) {
  Membership membership;
  membership.members.push_back(self);
  membership.links.resize(1);
  return membership;
}

// One rank's way through one round.
class Joiner {
 public:
  explicit Joiner(BootstrapOptions options)
      : options_(std::move(options)),
        patience_(std::in_place, options_.deadline, options_.interrupted) {}

  Result<Membership> Run();

 private:
  Status ReachStore();
  Status TryStore(const HostPort& where);
  Status TryStore(const SocketAddress& address);
  Status Shake(int fd);
  Status Listen();
  void Report();
  Status Meet();
  Status HearStore();
  Status OnMessage(const StoreMessage& message);
  Status OnTable(const StoreMessage& message);
  Status Wait();
  Status OnTimeUp(const Status& why);
  std::string StoreName() const { return StrCat("the rendezvous store at ", options_.rendezvous); }

  BootstrapOptions options_;
  std::optional<Patience> patience_;
  bool time_is_up_ = false;
  std::optional<StoreChannel> store_;
  bool store_decided_ = false;
  Listeners listeners_;
  std::optional<LinkBuilder> links_;
  std::vector<pollfd> polled_;
  bool told_connected_ = false;
  bool complete_ = false;
};

Result<Membership> Joiner::Run() {
  BAGUA_RETURN_IF_ERROR(ReachStore());
  Status status = Listen();
  if (status.ok()) {
    Report();
    status = Meet();
  }
  if (status.ok()) return links_->Take();
  // The others learn the reason, not only that a connection ended.
  if (!store_decided_) store_->Post(StoreWord::kFailed, EncodeFailure(status));
  return status;
}

// Connects to the store, which may not be there yet.
Status Joiner::ReachStore() {
  Result<HostPort> where = ParseHostPort(options_.rendezvous);
  if (!where.ok()) return where.status().WithContext("rendezvous");
  std::string last = "no answer";
  for (auto pause = kFirstPause;; pause = std::min(pause * 2, kLongestPause)) {
    const Status tried = TryStore(where.value());
    if (tried.ok() || tried.code() == StatusCode::kInvalidArgument) return tried;
    // Time that is up while waiting for an answer is no reason.
    if (tried.code() != StatusCode::kTimeout) last = tried.message();
    AwaitEvents(-1, 0, *patience_, static_cast<int>(pause.count()));
    const Status status = patience_->Check();
    if (status.code() == StatusCode::kTimeout)
      return Status(
          StatusCode::kTimeout,
          StrCat(StoreName(), " did not answer for ", ToTenths(patience_->waited_seconds()), " s (",
                 last, "). Start it, or set BAGUA_START_TIMEOUT_SECONDS to wait longer"));
    BAGUA_RETURN_IF_ERROR(status);
  }
}

// Once, all its addresses. kInvalidArgument is final.
Status Joiner::TryStore(const HostPort& where) {
  Result<std::vector<SocketAddress>> addresses = Resolve(where);
  if (!addresses.ok()) {
    const bool is_final = addresses.status().code() == StatusCode::kInvalidArgument &&
                          patience_->waited_seconds() > Seconds(kNamePatience).count();
    return is_final ? addresses.status().WithContext("rendezvous")
                    : Status(StatusCode::kInternal, addresses.status().message());
  }
  Status status;
  for (const SocketAddress& address : addresses.value()) {
    status = TryStore(address);
    if (status.ok()) return status;
    if (status.code() == StatusCode::kInvalidArgument) return status.WithContext(StoreName());
    BAGUA_RETURN_IF_ERROR(patience_->Check());
  }
  return status;
}

Status Joiner::TryStore(const SocketAddress& address) {
  Result<UniqueFd> fd = StartConnect(address);
  if (!fd.ok()) return fd.status();
  const int socket = fd.value().get();
  const Deadline until = Clock::now() + kHandshakePatience;
  while (true) {
    pollfd entry{socket, POLLOUT, 0};
    if (::poll(&entry, 1, patience_->SliceMs()) > 0) break;
    BAGUA_RETURN_IF_ERROR(patience_->Check());
    if (Clock::now() >= until)
      return Status(StatusCode::kPeerLost,
                    StrCat("connecting to ", ToText(address), ": no answer"));
  }
  BAGUA_RETURN_IF_ERROR(FinishConnect(socket, address));
  SetNoDelay(socket);
  SetHeartbeat(socket);
  BAGUA_RETURN_IF_ERROR(Shake(socket));
  // The table has as much for each rank as its report; its head fits into one more.
  const size_t most = kMaxReportBytes * (static_cast<size_t>(options_.size) + 1);
  store_.emplace(std::move(fd).value(), most);
  return {};
}

Status Joiner::Shake(int fd) {
  Result<Handshake> handshake =
      Handshake::Connect(options_.secret, RoundId{}, Purpose::kStore, options_.rank, kStoreRank);
  if (!handshake.ok()) return handshake.status();
  const Deadline until = Clock::now() + kHandshakePatience;
  while (true) {
    BAGUA_RETURN_IF_ERROR(handshake.value().Advance(fd));
    if (handshake.value().done()) return {};
    AwaitEvents(fd, handshake.value().events(), *patience_);
    BAGUA_RETURN_IF_ERROR(patience_->Check());
    if (Clock::now() >= until) return Status(StatusCode::kPeerLost, "no answer in the handshake");
  }
}

// The interface through which the store is reached is the one through which the others come. A
// store on loopback thus keeps every rank on loopback.
Status Joiner::Listen() {
  Result<UniqueFd> tcp = bagua::Listen(LocalAddress(store_->fd()).WithAnyPort());
  if (!tcp.ok()) return tcp.status();
  listeners_.tcp = std::move(tcp).value();
  options_.self.rank = options_.rank;
  options_.self.address = ToText(LocalAddress(listeners_.tcp.get()));
  options_.self.unix_name.clear();
  if (options_.tcp_everywhere) return {};
  std::array<std::byte, 16> name;
  BAGUA_RETURN_IF_ERROR(FillRandom(name));
  options_.self.unix_name = "bagua-" + ToHex(name);
  Result<UniqueFd> local = bagua::Listen(UnixAddress(options_.self.unix_name));
  if (!local.ok()) return local.status();
  listeners_.local = std::move(local).value();
  return {};
}

void Joiner::Report() {
  bagua::Report report;
  report.size = options_.size;
  if (options_.deadline != kForever)
    report.patience_seconds = std::max(0.0, Seconds(options_.deadline - Clock::now()).count());
  report.tcp_everywhere = options_.tcp_everywhere;
  report.member = options_.self;
  store_->Post(StoreWord::kReport, Encode(report));
}

Status Joiner::Meet() {
  while (true) {
    BAGUA_RETURN_IF_ERROR(HearStore());
    if (complete_) return {};
    if (links_ && !polled_.empty()) BAGUA_RETURN_IF_ERROR(links_->Progress(polled_));
    if (links_ && links_->complete() && !told_connected_) {
      told_connected_ = true;
      store_->Post(StoreWord::kConnected);
    }
    BAGUA_RETURN_IF_ERROR(Wait());
  }
}

Status Joiner::HearStore() {
  const Status ended = store_->Receive();
  while (std::optional<StoreMessage> message = store_->Take()) {
    if (store_decided_) continue;
    BAGUA_RETURN_IF_ERROR(OnMessage(*message));
  }
  if (ended.ok() || complete_) return {};
  store_decided_ = true;
  return Status(StatusCode::kPeerLost,
                StrCat("lost ", StoreName(), " before all ranks were connected: ", ended.message(),
                       ". The process that serves it (bagua-run, or rank 0 without it) has ended"));
}

Status Joiner::OnMessage(const StoreMessage& message) {
  if (message.word == StoreWord::kFailed) {
    store_decided_ = true;
    return DecodeFailure(message.payload);
  }
  if (message.word == StoreWord::kTable && !links_) return OnTable(message);
  if (message.word == StoreWord::kComplete && told_connected_) {
    store_decided_ = true;
    complete_ = true;
    return {};
  }
  return Status(StatusCode::kInternal, StrCat(StoreName(), " sent a message out of place"));
}

Status Joiner::OnTable(const StoreMessage& message) {
  Result<RoundTable> table = DecodeTable(message.payload);
  if (!table.ok()) return table.status();
  if (table.value().members.size() != static_cast<size_t>(options_.size))
    return Status(StatusCode::kInternal,
                  StrCat(StoreName(), " sent a table of ", table.value().members.size(),
                         " ranks instead of ", options_.size));
  polled_.clear();
  links_.emplace(options_.rank, std::move(table).value(), options_.tcp_everywhere, options_.secret,
                 std::move(listeners_));
  return links_->Start();
}

// Sleeps until something happens, the slice is over or a step is due.
Status Joiner::Wait() {
  const Status status = patience_->Check();
  if (!status.ok()) BAGUA_RETURN_IF_ERROR(OnTimeUp(status));
  store_->Flush();
  int milliseconds = patience_->SliceMs();
  polled_.clear();
  if (links_) {
    links_->AddInterest(&polled_);
    if (links_->next_time() != kForever) {
      const auto due =
          std::chrono::ceil<std::chrono::milliseconds>(links_->next_time() - Clock::now()).count();
      milliseconds = static_cast<int>(std::clamp<int64_t>(due, 0, milliseconds));
    }
  }
  polled_.push_back({store_->fd(), store_->events(), 0});
  if (::poll(polled_.data(), polled_.size(), milliseconds) <= 0)
    for (pollfd& entry : polled_) entry.revents = 0;
  return {};
}

Status Joiner::OnTimeUp(const Status& why) {
  if (why.code() != StatusCode::kTimeout) return why;
  if (links_ && !links_->complete())
    return Status(StatusCode::kTimeout,
                  StrCat("could not connect to ", links_->DescribeMissing(),
                         " in time. Set BAGUA_START_TIMEOUT_SECONDS to wait longer"));
  if (time_is_up_)
    return Status(StatusCode::kTimeout,
                  StrCat(StoreName(),
                         " does not answer. Set BAGUA_START_TIMEOUT_SECONDS to wait "
                         "longer"));
  time_is_up_ = true;
  patience_.emplace(Clock::now() + kVerdictPatience, options_.interrupted);
  return {};
}

}  // namespace

Result<Membership> Bootstrap(BootstrapOptions options) {
  BAGUA_RETURN_IF_ERROR(Validate(options));
  options.self.rank = options.rank;
  if (options.size == 1) return Alone(options.self);
  return Joiner(std::move(options)).Run();
}

std::string DefaultHostId() {
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat space {};
  ::stat("/proc/self/ns/net", &space);
  return StrCat(name, "/", boot, "/", space.st_ino);
}

}  // namespace bagua
