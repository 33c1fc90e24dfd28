// One line to stderr, "[bagua WARNING rank 3] text"; printed when `level` is at least the engine's.
#ifndef BAGUA_COMMON_BASE_LOGGING_H_
#define BAGUA_COMMON_BASE_LOGGING_H_

#include <functional>
#include <string>

namespace bagua {

enum class LogLevel : int { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };

LogLevel ParseLogLevel(const std::string& name);

// A rank's log. Thread-safety: any thread.
class Logger {
 public:
  using Sink = std::function<void(LogLevel, const std::string& line)>;
  Logger() = default;
  Logger(int rank, LogLevel level, Sink sink = {});
  void Log(LogLevel level, const std::string& text) const;

 private:
  int rank_ = 0;
  LogLevel level_ = LogLevel::kWarning;
  Sink sink_;
};

}  // namespace bagua

#endif  // BAGUA_COMMON_BASE_LOGGING_H_
