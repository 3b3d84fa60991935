import type { Agent, Clock, KvCaches, Log, SideChannel, Tracer, WorkerOptions } from "@kv/interface";
import type { ModelGeometry, RankGeometry } from "@kv/plan";
import type { ConnectorSettings } from "../config/connector-settings.js";
import type { ConnectorHandshake } from "../handshake/connector-handshake.js";
import type { TransferMetrics } from "../metrics/transfer-metrics.js";
import type { NotificationSender } from "../peers/messages.js";
import type { SharedLocalLists, SharedRemoteAgents } from "../peers/shared-agent-state.js";
import type { WorkerOutputQueue } from "./connector-worker.js";

/** What both halves of a connector's worker share: one agent, its registered caches, and the engine's clock, log and options. */
export interface WorkerContext {
  /** The worker's clock. */
  readonly clock: Clock;
  /** The engine's log. */
  readonly log: Log;
  /** Counters under vLLM's names. */
  readonly metrics: TransferMetrics;
  /** Records the worker's spans; undefined where none are wanted. */
  readonly tracer?: Tracer | undefined;
  /** The options that the engine created the worker with. */
  readonly options: WorkerOptions;
  /** The settings of the transfer config. */
  readonly settings: ConnectorSettings;
  /** Carries handshakes and lease queries. */
  readonly sideChannel: SideChannel;
  /** The transport's agent of this rank. */
  readonly agent: Agent;
  /** The registered KV caches: those of the groups that peers exchange. */
  readonly caches: KvCaches;
  /** Whether the engine's cache has one KV cache group, so that a block id alone identifies a block. */
  readonly hasSingleGroup: boolean;
  /** The same caches in the form that plans use. */
  readonly local: RankGeometry;
  /** The model's KV cache groups in the form that plans use. */
  readonly model: ModelGeometry;
  /** Both ends of this rank's handshakes. */
  readonly handshake: ConnectorHandshake;
  /** What the worker reports to the engine. */
  readonly output: WorkerOutputQueue;
  /** Sends notifications in the background. */
  readonly notifications: NotificationSender;
  /** Prepared lists of local memory. */
  readonly localLists: SharedLocalLists;
  /** The remote agents that the agent knows. */
  readonly remoteAgents: SharedRemoteAgents;
}
