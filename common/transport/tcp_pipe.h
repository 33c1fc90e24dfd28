// A Pipe over a connected stream socket.
#ifndef BAGUA_COMMON_TRANSPORT_TCP_PIPE_H_
#define BAGUA_COMMON_TRANSPORT_TCP_PIPE_H_

#include <memory>

#include "common/base/fd.h"
#include "common/transport/pipe.h"

namespace bagua {

// `socket` is connected and non-blocking. The kernel holds back a small piece written with `more`,
// so that a header travels with its payload. A reset connection is kPeerLost; it never raises
// SIGPIPE.
std::unique_ptr<Pipe> MakeTcpPipe(UniqueFd socket);

}  // namespace bagua

#endif  // BAGUA_COMMON_TRANSPORT_TCP_PIPE_H_
