import {
  type EngineReference,
  endWith,
  type RemoteEngine,
  type RemoteEngines,
  type RemoteRequest,
  type TaskTracker,
  type WorkerContext,
} from "@kv/connector/building-blocks";
import { encodeNotification, encodeRequestControl, REQUEST_CONTROL } from "@kv/protocol";

/** The parts of the worker that releases use. */
export interface BlockReleasesOptions {
  readonly context: Pick<WorkerContext, "log" | "metrics" | "notifications" | "tracer">;
  readonly engines: Pick<RemoteEngines, "notify">;
  /** Tracks notifications that wait for a handshake. */
  readonly tasks: TaskTracker;
}

/** Blocks at a P, and the engine that they are read from. */
interface Held {
  readonly remote: RemoteRequest;
  readonly reference: EngineReference<RemoteEngine>;
}

/**
 * Notifies each P that this rank does not need a request's blocks any more, when the scheduler says that no request here reads them. The notification
 * never rides on a READ: while one runs, another request may begin to read the same blocks.
 */
export class BlockReleases {
  readonly #options: BlockReleasesOptions;
  readonly #held = new Map<string, Held>();
  /** Blocks at P's that did not complete the handshake. */
  readonly #unreachable = new Set<string>();

  constructor(options: BlockReleasesOptions) {
    this.#options = options;
  }

  /** Keeps the engine open until `release`. */
  hold(remote: RemoteRequest, reference: EngineReference<RemoteEngine>): void {
    const key = keyOf(remote);
    this.#held.get(key)?.reference.release();
    this.#held.set(key, { remote, reference });
    this.#unreachable.delete(key);
  }

  /** Called when the handshake with P has failed: its blocks are released without another one, by the end of their lease. */
  unreachable(remote: RemoteRequest): void {
    const key = keyOf(remote);
    if (!this.#held.has(key)) this.#unreachable.add(key);
  }

  /** Notifies P's ranks in the background. A P that was not read from is shaken hands with first. */
  release(remote: RemoteRequest): void {
    const key = keyOf(remote);
    if (this.#unreachable.delete(key)) return;
    const held = this.#held.get(key);
    if (held !== undefined) {
      this.#held.delete(key);
      this.#notify(held.reference.engine, remote);
      held.reference.release();
      return;
    }
    const { engines, tasks } = this.#options;
    const { log, metrics } = this.#options.context;
    tasks.track(
      engines.notify(
        remote,
        (engine) => this.#notify(engine, remote),
        (error) => {
          metrics.notificationFailed();
          log.warn("notification_failed", { requestId: remote.requestId, error: String(error) });
        },
      ),
    );
  }

  /** Releases everything that was read from, because the worker closes. */
  releaseAll(): void {
    for (const { remote } of [...this.#held.values()]) this.release(remote);
    this.#unreachable.clear();
  }

  #notify(engine: RemoteEngine, remote: RemoteRequest): void {
    const { log, metrics, notifications, tracer } = this.#options.context;
    const payload = doneNotification(engine, remote);
    for (const [remoteRank, agent] of engine.agents) {
      const span = tracer?.start("kv.notify", {
        parent: remote.traceparent,
        attributes: { "kv.remote_agent": agent },
      });
      const sent = notifications.send(agent, payload, (error) => {
        // P frees the blocks when the lease ends.
        metrics.notificationFailed();
        span?.end(error);
        log.warn("notification_failed", { requestId: remote.requestId, remoteRank, error: String(error) });
      });
      void endWith(span, sent);
    }
  }
}

/** `"{id}:{n}"`, or the same with the request's capability: n is the number of D's ranks that P's rank waits for. */
function doneNotification({ plan, features }: RemoteEngine, { requestId, lease }: RemoteRequest): Uint8Array {
  const readers = plan.localConsumers;
  const { capability } = lease ?? {};
  return capability !== undefined && features.has(REQUEST_CONTROL)
    ? encodeRequestControl({ kind: "done", requestId, readers, capability })
    : encodeNotification({ kind: "done", requestId, readers });
}

function keyOf({ engineId, requestId, lease }: RemoteRequest): string {
  return JSON.stringify([engineId, requestId, lease?.capability]);
}
