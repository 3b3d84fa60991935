import type { Agent, Log } from "@kv/interface";
import { encodeNotification } from "@kv/protocol";
import type { RemoteLink } from "./remote-engine.js";

/** What a worker says to its peers. Nothing here throws: a word that is lost costs a lease or a deadline, never a request. */
export interface Messages {
  /** True when the transport took it; `failed` hears why it did not. */
  send(agentName: string, payload: Uint8Array, failed: (error: unknown) => void): Promise<boolean>;
  /** Keeps the requests' leases alive, with all of the engine's ranks that this one knows; true when the transport took them all. */
  beat(link: RemoteLink, wireIds: readonly string[]): Promise<boolean>;
  /** Resolves when everything said so far was handed over or was lost. */
  idle(): Promise<void>;
  readonly size: number;
}

/** A few hundred ids a message: well below any transport's limit. */
const HEARTBEAT_IDS = 256;

export function createMessages({ agent, log }: { agent: Agent; log: Log }): Messages {
  const pending = new Set<Promise<boolean>>();

  function send(name: string, payload: Uint8Array, failed: (error: unknown) => void): Promise<boolean> {
    const sent = agent
      .notify(name, payload)
      .then(
        () => true,
        (error: unknown) => {
          failed(error);
          return false;
        },
      )
      .finally(() => pending.delete(sent));
    pending.add(sent);
    return sent;
  }

  return {
    send,
    async beat(link, wireIds) {
      const sent: Promise<boolean>[] = [];
      for (const requestIds of chunks(wireIds.filter(sayable), HEARTBEAT_IDS)) {
        const payload = encodeNotification({ kind: "heartbeat", requestIds });
        for (const name of new Set(link.agents.values())) {
          const failed = (error: unknown) =>
            log.debug("heartbeat-failed", { agent: name, error: String(error) });
          sent.push(send(name, payload, failed));
        }
      }
      return (await Promise.all(sent)).every(Boolean);
    },
    async idle() {
      while (pending.size > 0) await Promise.all(pending);
    },
    get size() {
      return pending.size;
    },
  };
}

/** A vLLM producer splits heartbeats at commas: an id that holds one cannot be said, and its lease ends unextended. */
function sayable(wireId: string): boolean {
  return !wireId.includes(",");
}

function chunks<T>(list: readonly T[], length: number): T[][] {
  const parts: T[][] = [];
  for (let i = 0; i < list.length; i += length) parts.push(list.slice(i, i + length));
  return parts;
}
