// Life of the engine, and the questions that need no step: facts, layers, sharding, parameters.
#include "server/engine/engine_impl.h"

#include <sys/statvfs.h>

#include <fstream>
#include <utility>

#include "base/error.h"
#include "base/ids.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/strings.h"

namespace expertd::engine {
namespace {

std::string ReadBootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

// The file system at /dev/shm, which ranks of one host may exchange data through.
int64_t ReadSharedMemoryBytes() {
  struct statvfs info = {};
  if (statvfs("/dev/shm", &info) != 0) return -1;
  return static_cast<int64_t>(info.f_blocks) * static_cast<int64_t>(info.f_frsize);
}

ServerFacts MakeFacts(const EngineOptions& options, const Device& device) {
  ServerFacts facts;
  facts.slot = options.slot;
  facts.incarnation = RandomId();
  facts.boot_id = ReadBootId();
  facts.shared_memory_bytes = ReadSharedMemoryBytes();
  facts.device = device.facts();
  facts.backends = ListEpBackends(device);
  facts.recipes = ListRecipes(device);
  facts.mlps = ListExpertMlps(device);
  return facts;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(EngineOptions options) {
  DeviceState state;
  ASSIGN_OR_RETURN(state.device, CreateDevice(options.device));
  state.router = CreateRouterKernels(*state.device);
  state.optim = CreateOptimKernels(*state.device);
  state.expert_mlp = options.expert_mlp;
  return std::make_unique<EngineImpl>(std::move(options), std::move(state));
}

EngineImpl::EngineImpl(EngineOptions options, DeviceState state)
    : options_(std::move(options)),
      facts_(MakeFacts(options_, *state.device)),
      state_(std::move(state)),
      tensors_({options_.tensor_memory_bytes, options_.queue_capacity}),
      board_(std::make_shared<PeerBoard>()),
      book_(SequenceOptions{}),
      device_thread_(std::make_unique<DeviceThread>()),
      watchdog_([this] { Watch(); }) {}

EngineImpl::~EngineImpl() {
  Answers answers;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    FenceLocked(Error(Reason::kCancelled).Text("the daemon is stopping"), answers);
    for (Watcher& watcher : watchers_) {
      answers.push_back([done = std::move(watcher.done), info = DescribeLocked()] { done(info); });
    }
    watchers_.clear();
  }
  for (auto& answer : answers) answer();
  watchdog_.join();
  device_thread_->Post([this] { DropSession(); });
  device_thread_.reset();  // runs what is queued
}

uint64_t EngineImpl::HighestEpochSeen() const {
  MutexLock lock(mutex_);
  return machine_.highest_epoch_seen();
}

bool EngineImpl::Draining() const {
  MutexLock lock(mutex_);
  return machine_.draining();
}

EngineCounters EngineImpl::Counters() const {
  const TensorStore::Usage usage = tensors_.GetUsage();
  MutexLock lock(mutex_);
  EngineCounters counters = counters_;
  counters.queue_capacity = options_.queue_capacity;
  counters.bytes_in_flight_limit = options_.bytes_in_flight;
  counters.tensors = usage.tensors;
  counters.tensor_bytes = usage.bytes;
  return counters;
}

void EngineImpl::RefreshLayers() {
  std::map<std::string, LayerInfo> layers;
  for (const auto& [id, layer] : state_.layers) layers.emplace(id, layer->info());
  MutexLock lock(mutex_);
  layers_ = std::move(layers);
}

std::vector<LayerInfo> EngineImpl::ListLayers() const {
  MutexLock lock(mutex_);
  std::vector<LayerInfo> layers;
  for (const auto& [id, info] : layers_) layers.push_back(info);
  return layers;
}

absl::StatusOr<LayerInfo> EngineImpl::FindLayer(const std::string& layer_id) const {
  MutexLock lock(mutex_);
  auto found = layers_.find(layer_id);
  if (found != layers_.end()) return found->second;
  return Error(Reason::kLayerUnknown)
      .Text("layer is unknown: got \"", layer_id, "\"")
      .With("layer_id", layer_id);
}

absl::StatusOr<ShardingMetadata> EngineImpl::GetShardingMetadata(
    const std::string& layer_id, const std::vector<int64_t>& tokens_per_rank) const {
  ASSIGN_OR_RETURN(const LayerInfo layer, FindLayer(layer_id));
  MutexLock lock(mutex_);
  if (session_ == nullptr) {
    return Error(Reason::kGroupNotReady).Text("no group is formed here: sharding needs its mesh");
  }
  ASSIGN_OR_RETURN(
      ShardingMetadata metadata,
      DescribeSharding(layer_id, layer.config, group_config_, session_->places, tokens_per_rank));
  metadata.group_id = machine_.group_id();
  metadata.epoch = machine_.epoch();
  return metadata;
}

void EngineImpl::Release(std::vector<uint64_t> tickets, std::vector<uint64_t> handles,
                         std::function<void(int64_t)> done) {
  device_thread_->Post(
      [this, tickets = std::move(tickets), handles = std::move(handles), done = std::move(done)] {
        std::shared_ptr<GroupSession> session;
        {
          MutexLock lock(mutex_);
          session = session_;
        }
        int64_t released = 0;
        if (session != nullptr) {
          for (uint64_t id : tickets) {
            if (TicketState* ticket = session->tickets.Find(id)) {
              session->ticket_bytes -= ticket->bytes;
              session->tickets.Erase(id);
              ++released;
            }
          }
          for (uint64_t id : handles) released += session->handles.Erase(id) ? 1 : 0;
          MutexLock lock(mutex_);
          counters_.tickets = static_cast<int64_t>(session->tickets.states().size());
          counters_.ticket_bytes = session->ticket_bytes;
        }
        done(released);
      });
}

void EngineImpl::GetParameter(const std::string& layer_id, const std::string& parameter,
                              ParameterKind kind,
                              std::function<void(absl::StatusOr<ParameterShard>)> done) {
  device_thread_->Post([this, layer_id, parameter, kind, done = std::move(done)] {
    done(ReadParameter(layer_id, parameter, kind));
  });
}

absl::StatusOr<ParameterShard> EngineImpl::ReadParameter(const std::string& layer_id,
                                                         const std::string& name,
                                                         ParameterKind kind) {
  auto found = state_.layers.find(layer_id);
  if (found == state_.layers.end()) {
    return Error(Reason::kLayerUnknown)
        .Text("layer is unknown: got \"", layer_id, "\"")
        .With("layer_id", layer_id);
  }
  Layer& layer = *found->second;
  Parameter* parameter = layer.Find(name);
  if (parameter == nullptr) {
    std::string known;
    for (const Parameter& other : layer.parameters()) {
      StrAppend(&known, known.empty() ? "" : ", ", other.name);
    }
    return Error(Reason::kConfigInvalid)
        .At("parameter", StrCat("got \"", name, "\", need one of ", known));
  }
  const DeviceBuffer* buffer = &parameter->master;
  DType dtype = DType::kF32;
  if (kind == ParameterKind::kCompute && parameter->compute.data() != nullptr) {
    buffer = &parameter->compute;
    dtype = layer.config().weight_dtype;
  }
  if (kind == ParameterKind::kGradient) buffer = &parameter->gradient;
  if (kind == ParameterKind::kFirstMoment) buffer = &parameter->first;
  if (kind == ParameterKind::kSecondMoment) buffer = &parameter->second;
  if (buffer->data() == nullptr && parameter->count > 0) {
    return Error(Reason::kConfigInvalid)
        .At("kind", StrCat("got a kind that ", name, " does not have",
                           layer.info().frozen ? " in a frozen layer" : ""));
  }
  ParameterShard shard;
  shard.tensor.dtype = dtype;
  shard.tensor.shape = parameter->local_shape;
  shard.tensor.data.resize(static_cast<size_t>(buffer->size()));
  shard.offsets = parameter->offsets;
  shard.weights_version = layer.info().weights_version;
  RETURN_IF_ERROR(
      state_.device->CopyToHost(shard.tensor.data.data(), buffer->data(), buffer->size()));
  return shard;
}

// Says nothing about epochs: a record of an epoch not joined here cannot be verified yet.
absl::Status EngineImpl::OnPeerRecord(const PeerRecord& record) { return board_->Post(record); }

}  // namespace expertd::engine
