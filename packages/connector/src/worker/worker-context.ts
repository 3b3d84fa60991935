import type { Agent, Clock, KvCaches, Log, SideChannel, WorkerOptions } from "@kv/interface";
import type { ModelGeometry, RankGeometry } from "@kv/plan";
import type { ConnectorSettings } from "../config/connector-settings.js";
import type { ConnectorHandshake } from "../handshake/connector-handshake.js";
import type { TransferMetrics } from "../metrics/transfer-metrics.js";
import type { NotificationSender } from "../peers/notification-sender.js";
import type { SharedLocalLists, SharedRemoteAgents } from "../peers/shared-agent-state.js";
import type { WorkerOutputQueue } from "./worker-output.js";

/** What both halves of a connector's worker share: one agent, its registered caches, and the engine's surroundings. */
export interface WorkerContext {
  readonly clock: Clock;
  readonly log: Log;
  /** Counters under vLLM's names. */
  readonly metrics: TransferMetrics;
  /** The options that the engine created the worker with. */
  readonly options: WorkerOptions;
  readonly settings: ConnectorSettings;
  readonly sideChannel: SideChannel;
  readonly agent: Agent;
  /** The registered KV caches. */
  readonly caches: KvCaches;
  /** The same caches as plans describe a rank. */
  readonly local: RankGeometry;
  /** The model's KV cache groups as plans describe them. */
  readonly model: ModelGeometry;
  readonly handshake: ConnectorHandshake;
  readonly output: WorkerOutputQueue;
  readonly notifications: NotificationSender;
  readonly localLists: SharedLocalLists;
  readonly remoteAgents: SharedRemoteAgents;
}
