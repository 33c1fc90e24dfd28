#include "tests/cpp/rendezvous_fixture.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cstring>

namespace bagua::rendezvous_test {

int OpenDescriptors() {
  DIR* const folder = ::opendir("/proc/self/fd");
  int count = 0;
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

bool WaitFor(int fd, short events) {
  pollfd entry{fd, events, 0};
  return ::poll(&entry, 1, 5000) == 1;
}

std::vector<Outcome> RunAll(const Job& job, int size) {
  std::vector<BootstrapOptions> options;
  for (int rank = 0; rank < size; ++rank) options.push_back(job.OptionsOf(rank));
  return Ranks(std::move(options)).Take();
}

void ExpectFailure(const Outcome& outcome, StatusCode code, std::vector<string> parts) {
  ASSERT_FALSE(outcome.ok());
  EXPECT_EQ(outcome.status().code(), code) << outcome.status().message();
  for (const string& part : parts)
    EXPECT_TRUE(Contains(outcome.status().message(), part))
        << "'" << part << "' is not in: " << outcome.status().message();
}

HandRank::HandRank(const Job& job, int rank, Bytes secret) : rank_(rank), secret_(secret) {
  fd_ = ConnectTo(job.port());
  handshake_.emplace(
      Handshake::Connect(secret_, RoundId{}, Purpose::kStore, rank, kStoreRank).value());
  while (status_.ok() && !handshake_->done()) {
    if (!WaitFor(fd_.get(), handshake_->events())) status_ = {StatusCode::kTimeout, "test"};
    if (status_.ok()) status_ = handshake_->Advance(fd_.get());
  }
  if (status_.ok()) channel_.emplace(std::move(fd_), kMaxReportBytes * 16);
}

UniqueFd HandRank::ConnectTo(int port) {
  SocketAddress address = Resolve({"127.0.0.1", port}).value().front();
  UniqueFd fd = StartConnect(address).value();
  EXPECT_TRUE(WaitFor(fd.get(), POLLOUT));
  return fd;
}

void HandRank::Report(int size, bool tcp, double patience) {
  listeners_.tcp = Listen(Resolve({"127.0.0.1", 0}).value().front()).value();
  const string name =
      StrCat("bagua-test-", ::getpid(), "-", rank_, "-", Clock::now().time_since_epoch().count());
  listeners_.local = Listen(UnixAddress(name)).value();
  bagua::Report report;
  report.size = size;
  report.patience_seconds = patience;
  report.tcp_everywhere = tcp;
  report.member.pid = ::getpid();
  report.member.host_id = "testhost/boot/1";
  report.member.address = ToText(LocalAddress(listeners_.tcp.get()));
  report.member.unix_name = name;
  channel_->Post(StoreWord::kReport, Encode(report));
}

std::optional<StoreMessage> HandRank::Hear() {
  while (true) {
    const Status status = channel_->Receive();
    if (std::optional<StoreMessage> message = channel_->Take()) return message;
    if (!status.ok() || !WaitFor(channel_->fd(), POLLIN)) return std::nullopt;
  }
}

RoundTable HandRank::HearTable() {
  const std::optional<StoreMessage> message = Hear();
  EXPECT_TRUE(message && message->word == StoreWord::kTable);
  return message ? DecodeTable(message->payload).value() : RoundTable{};
}

Membership HandRank::ConnectAll(RoundTable table, bool tcp) {
  LinkBuilder builder(rank_, std::move(table), tcp, secret_, std::move(listeners_));
  EXPECT_TRUE(builder.Start().ok());
  while (!builder.complete()) {
    std::vector<pollfd> polled;
    builder.AddInterest(&polled);
    ::poll(polled.data(), polled.size(), 10);
    const Status status = builder.Progress(polled);
    EXPECT_TRUE(status.ok()) << status.message();
    if (!status.ok()) break;
  }
  return builder.Take();
}

std::vector<UniqueFd*> SocketsOf(PeerLink* link) {
  std::vector<UniqueFd*> sockets = {&link->lifeline};
  if (!link->local) sockets.insert(sockets.end(), {&link->control, &link->data});
  return sockets;
}

void ExpectConnected(std::vector<Outcome>* outcomes, bool tcp) {
  const int size = static_cast<int>(outcomes->size());
  for (Outcome& outcome : *outcomes) ASSERT_TRUE(outcome.ok()) << outcome.status().message();
  const auto link = [&](int from, int to) { return &(*outcomes)[from].value().links[to]; };
  for (int from = 0; from < size; ++from) {
    const Membership& membership = (*outcomes)[from].value();
    ASSERT_EQ(membership.members.size(), static_cast<size_t>(size));
    for (int to = 0; to < size; ++to) {
      EXPECT_EQ(membership.members[to].rank, to);
      EXPECT_EQ(membership.members[to].pid, ::getpid());
      EXPECT_EQ(membership.members[to].framework, "test");
      if (to == from) continue;
      EXPECT_EQ(link(from, to)->local, !tcp);
      EXPECT_EQ(link(from, to)->control.valid(), tcp);
      EXPECT_EQ(link(from, to)->data.valid(), tcp);
      for (UniqueFd* socket : SocketsOf(link(from, to))) {
        ASSERT_TRUE(socket->valid());
        EXPECT_NE(::fcntl(socket->get(), F_GETFL) & O_NONBLOCK, 0);
        EXPECT_NE(::fcntl(socket->get(), F_GETFD) & FD_CLOEXEC, 0);
        const std::array<int, 3> said = {from, to,
                                         static_cast<int>(socket - &link(from, to)->lifeline)};
        ASSERT_EQ(::send(socket->get(), said.data(), sizeof(said), 0), ssize_t{sizeof(said)});
      }
    }
  }
  for (int from = 0; from < size; ++from)
    for (int to = 0; to < size; ++to) {
      if (to == from) continue;
      for (UniqueFd* socket : SocketsOf(link(to, from))) {
        std::array<int, 3> heard{};
        ASSERT_TRUE(WaitFor(socket->get(), POLLIN));
        ASSERT_EQ(::recv(socket->get(), heard.data(), sizeof(heard), 0), ssize_t{sizeof(heard)});
        EXPECT_EQ(heard[0], from);
        EXPECT_EQ(heard[1], to);
        EXPECT_EQ(heard[2], socket - &link(to, from)->lifeline);
      }
    }
}

void Noise::Throw(const SocketAddress& address) {
  Result<UniqueFd> fd = StartConnect(address);
  if (!fd.ok() || !WaitFor(fd.value().get(), POLLOUT)) return;
  Bytes bytes(random_() % 300);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
  const uint64_t magic = 0x314b485341554741;
  if (random_() % 2 == 0 && bytes.size() > 12) {
    std::memcpy(bytes.data(), &magic, sizeof(magic));
    if (random_() % 2 == 0)
      bytes[8] = std::byte{1}, bytes[9] = bytes[10] = bytes[11] = std::byte{0};
  }
  ::send(fd.value().get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (random_() % 3 == 0) return;
  open_.push_back(std::move(fd).value());
  if (open_.size() > 150) open_.erase(open_.begin());
}

}  // namespace bagua::rendezvous_test
