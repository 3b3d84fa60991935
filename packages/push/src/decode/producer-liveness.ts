import type { AwaitedRequest, Peers, RemoteLink } from "@kv/connector";
import { KvError } from "@kv/interface";
import type { RegistrationOrder } from "../step-metadata.js";

/**
 * A producer that dies between a registration and its WRITE sends no word. A heartbeat that the transport does not take raises the
 * question; another process in its place answers it, and so does nobody, asked twice. vLLM's listener would die of the question: of a vLLM
 * producer two such heartbeats in a row are the answer.
 */
export interface Suspicion {
  /** A heartbeat was taken. */
  alive(engineId: string): void;
  /** One was not. Never rejects. */
  ask(engineId: string): Promise<void>;
}

export interface SuspicionOptions {
  readonly peers: Peers<RemoteLink>;
  waiting(): Iterable<AwaitedRequest<RegistrationOrder>>;
  /** The process that answers at the producer's address now; undefined when nobody can be asked. */
  processAt(order: RegistrationOrder): Promise<string | undefined>;
}

export function createSuspicion({ peers, waiting, processAt }: SuspicionOptions): Suspicion {
  /** Heartbeats in a row that a producer did not take. */
  const silent = new Map<string, number>();
  return {
    alive: (engineId) => void silent.delete(engineId),
    async ask(engineId) {
      const concerned = [...waiting()].filter(({ order }) => order.remote.engineId === engineId);
      const link = peers.peek(engineId);
      const first = concerned[0];
      if (first === undefined || link === undefined) return;
      const answers = link.incarnation !== undefined;
      const process = answers ? await processAt(first.order) : undefined;
      const times = (silent.get(engineId) ?? 0) + 1;
      silent.set(engineId, times);
      if (process === undefined ? times < 2 : process === link.incarnation) return;
      silent.delete(engineId);
      const gone = answers ? "does not answer" : "takes no heartbeat";
      const reason = process === undefined ? gone : "was restarted";
      peers.drop(engineId, `it ${reason}`, link);
      for (const { fail, order } of concerned) {
        const message = `engine ${engineId} ${reason} before it wrote the KV of request ${order.requestId}`;
        fail(new KvError("KV_PEER_DISCONNECTED", message));
      }
    },
  };
}
