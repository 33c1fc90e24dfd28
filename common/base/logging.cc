#include "common/base/logging.h"

#include <cstdio>
#include <utility>

namespace bagua {

LogLevel ParseLogLevel(const std::string& name) {
  if (name == "debug") return LogLevel::kDebug;
  if (name == "info") return LogLevel::kInfo;
  if (name == "error") return LogLevel::kError;
  return LogLevel::kWarning;
}

Logger::Logger(int rank, LogLevel level, Sink sink)
    : rank_(rank), level_(level), sink_(std::move(sink)) {}

void Logger::Log(LogLevel level, const std::string& text) const {
  if (level < level_) return;
  static constexpr const char* kNames[] = {"DEBUG", "INFO", "WARNING", "ERROR"};
  const std::string line = std::string("[bagua ") + kNames[static_cast<int>(level)] + " rank " +
                           std::to_string(rank_) + "] " + text + "\n";
  if (sink_) {
    sink_(level, line);
    return;
  }
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace bagua
