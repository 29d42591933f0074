// Tests of the config: precedence, all problems at once, names equal to the message's fields.
#include "server/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "expertd/v1/server_config.pb.h"
#include "server/config_source.h"
#include "server/exit_code.h"

namespace expertd::server {
namespace {

using Args = std::vector<std::string>;

// A file that is removed with the object.
class TempFile {
 public:
  explicit TempFile(const std::string& text) {
    char path[] = "/tmp/expertd_config_XXXXXX";
    close(mkstemp(path));
    path_ = path;
    std::ofstream(path_) << text;
  }
  ~TempFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string Problems(const Args& args, const Environment& environment = {}) {
  const absl::StatusOr<CommandLine> line = ParseCommandLine(args, environment);
  return line.ok() ? "" : std::string(line.status().message());
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(ConfigTest, Defaults) {
  const Config config = DefaultConfig();
  EXPECT_EQ(config.listen, "127.0.0.1:7301");
  EXPECT_EQ(config.device, "cpu");
  EXPECT_EQ(config.max_receive_message_bytes, int64_t{1} << 30);
  EXPECT_EQ(config.queue_capacity, 256);
  EXPECT_EQ(config.bytes_in_flight, int64_t{4} << 30);
  EXPECT_EQ(config.log_level, LogLevel::kInfo);
  EXPECT_FALSE(config.tls.enabled());
  EXPECT_EQ(Problems({}), "");
}

TEST(ConfigTest, EveryFieldIsAFlagAVariableAndInTheHelp) {
  const std::string help = HelpText();
  const absl::StatusOr<CommandLine> line = ParseCommandLine({}, {});
  ASSERT_TRUE(line.ok());
  const auto* descriptor = v1::ServerConfig::descriptor();
  ASSERT_EQ(static_cast<int>(line->values.size()), descriptor->field_count());
  for (int i = 0; i < descriptor->field_count(); ++i) {
    EXPECT_EQ(line->values[i].first, descriptor->field(i)->name());
    EXPECT_TRUE(Contains(help, "--" + descriptor->field(i)->name() + "  ("));
    EXPECT_TRUE(Contains(help, "(" + EnvironmentName(descriptor->field(i)->name()) + ")"));
  }
  EXPECT_EQ(EnvironmentName("probe_listen"), "EXPERTD_PROBE_LISTEN");
}

TEST(ConfigTest, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  const TempFile file("slot: 1 queue_capacity: 11 expert_mlp: 'plain'  # a comment\n");
  const absl::StatusOr<CommandLine> line =
      ParseCommandLine({"--config", file.path(), "--slot=3"},
                       {{"EXPERTD_SLOT", "2"}, {"EXPERTD_QUEUE_CAPACITY", "22"}});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->config.slot, 3);
  EXPECT_EQ(line->config.queue_capacity, 22);
  EXPECT_EQ(line->config.expert_mlp, "plain");
  EXPECT_EQ(line->config.simulate, 0);
}

TEST(ConfigTest, FileMayBeNamedByTheEnvironment) {
  const TempFile file("slot: 5");
  EXPECT_EQ(ParseCommandLine({}, {{"EXPERTD_CONFIG", file.path()}})->config.slot, 5);
}

TEST(ConfigTest, EmptyVariablesAndForeignOnesDoNotCount) {
  const absl::StatusOr<CommandLine> line =
      ParseCommandLine({}, {{"EXPERTD_SLOT", ""}, {"EXPERTD_PORT", "tcp://10.0.0.1:80"}});
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->config.slot, 0);
}

TEST(ConfigTest, AllProblemsOfAllSourcesAreReportedAtOnce) {
  const TempFile file("slot: -1\nno_such_field: 3\nlog_level: 'loud'\nnor_this: 'x'\n");
  const std::string problems = Problems(
      {"--config=" + file.path(), "--bogus", "--queue_capacity=0", "--listen", "nowhere", "stray"},
      {{"EXPERTD_CPU_THREADS", "many"}, {"EXPERTD_DEVICE", "tpu"}});
  for (const std::string& part :
       {std::string("unknown flag --bogus"), std::string("stray"),
        std::string("--queue_capacity: got 0, need 1 to 1000000"),
        std::string("--listen: got \"nowhere\""),
        std::string("EXPERTD_CPU_THREADS: got \"many\", need a whole number"),
        std::string("EXPERTD_DEVICE: got \"tpu\", need cpu or cuda:N"),
        file.path() + ": slot: got -1, need 0 to", std::string("no_such_field"),
        std::string("nor_this"), file.path() + ": log_level: got \"loud\""}) {
    EXPECT_TRUE(Contains(problems, part)) << part << " is missing in:\n" << problems;
  }
}

TEST(ConfigTest, ValuesAreNeverClipped) {
  EXPECT_TRUE(Contains(Problems({"--max_receive_message_bytes=2147483648"}),
                       "got 2147483648, need 1048576 to 2147483647"));
  EXPECT_EQ(Problems({"--max_receive_message_bytes=2147483647"}), "");
  EXPECT_TRUE(Contains(Problems({"--slot=9223372036854775808"}), "whole number of 64 bits"));
}

TEST(ConfigTest, FlagWithoutValueAndUnreadableFile) {
  EXPECT_TRUE(Contains(Problems({"--slot"}), "--slot: got no value"));
  EXPECT_TRUE(Contains(Problems({"--config=/no/such/file"}), "cannot read /no/such/file"));
  const TempFile broken("slot: {");
  EXPECT_TRUE(Contains(Problems({"--config", broken.path()}), broken.path() + ":1:"));
}

TEST(ConfigTest, TlsFilesComeTogetherAndMustBeReadable) {
  const TempFile pem("x");
  EXPECT_TRUE(Contains(Problems({"--tls_cert=" + pem.path()}), "need both or none"));
  EXPECT_TRUE(Contains(Problems({"--tls_client_ca=" + pem.path()}), "without tls_cert"));
  EXPECT_TRUE(
      Contains(Problems({"--tls_cert=" + pem.path(), "--tls_key=/no/key"}), "cannot read /no/key"));
  EXPECT_EQ(Problems({"--tls_cert=" + pem.path(), "--tls_key=" + pem.path()}), "");
}

TEST(ConfigTest, HelpAndVersionWinOverProblems) {
  EXPECT_EQ(ParseCommandLine({"--help", "--bogus"}, {})->command, Command::kHelp);
  EXPECT_EQ(ParseCommandLine({"--version"}, {})->command, Command::kVersion);
}

TEST(ConfigTest, SimulatedDaemonsGetTheirOwnSlotsAndPorts) {
  const absl::StatusOr<CommandLine> line = ParseCommandLine(
      {"--simulate=3", "--listen=127.0.0.1:7000", "--probe_listen=127.0.0.1:0", "--slot=4"}, {});
  ASSERT_TRUE(line.ok()) << line.status();
  const std::vector<Config> configs = SimulatedConfigs(line->config);
  ASSERT_EQ(configs.size(), 3u);
  EXPECT_EQ(configs[2].slot, 6);
  EXPECT_EQ(configs[2].listen, "127.0.0.1:7002");
  EXPECT_EQ(configs[2].probe_listen, "127.0.0.1:0");
  EXPECT_EQ(configs[2].default_backend, "loopback");
  EXPECT_TRUE(Contains(Problems({"--simulate=2", "--device=cuda:0"}), "need cpu"));
}

TEST(ExitCodeTest, ErrorsOfStartingHaveTheirCodes) {
  EXPECT_EQ(ExitCodeOf(absl::OkStatus()), ExitCode::kOk);
  EXPECT_EQ(ExitCodeOf(absl::AlreadyExistsError("port")), ExitCode::kAddressInUse);
  EXPECT_EQ(ExitCodeOf(Error(Reason::kConfigInvalid).Text("x")), ExitCode::kUsage);
  EXPECT_EQ(ExitCodeOf(Error(Reason::kBackendUnsupported).Text("x")), ExitCode::kDeviceUnavailable);
  EXPECT_EQ(ExitCodeOf(Error(Reason::kDeviceFault).Text("x")), ExitCode::kDeviceFault);
  EXPECT_EQ(ExitCodeOf(absl::InternalError("x")), ExitCode::kInternal);
}

}  // namespace
}  // namespace expertd::server
