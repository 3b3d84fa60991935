import type { Agent, Notification, Transport } from "@kv/interface";
import {
  decodeNotification,
  type ExtensionMessage,
  encodeNotification,
  type KvNotification,
} from "@kv/protocol";

/**
 * Rules that push must keep, broken from outside: the fault run has to find each of them, or it proves nothing.
 * believe-itself: a consumer takes its own withdrawal for the producer's answer, so blocks go to others while a WRITE may come.
 * no-generations: a producer takes every registration for a new one, so one that comes after its withdrawal is served.
 * release-early: memory is taken to be free as soon as a transfer is known to have failed.
 */
export type PushSabotage = "believe-itself" | "no-generations" | "release-early";

export function sabotagedPush(sabotage: PushSabotage): (transport: Transport) => Transport {
  return (transport) => ({
    ...transport,
    async createAgent(options) {
      const agent = await transport.createAgent(options);
      if (sabotage === "believe-itself") return believingItself(agent);
      if (sabotage === "no-generations") return withoutGenerations(agent);
      return careless(agent);
    },
  });
}

function careless(agent: Agent): Agent {
  return {
    ...agent,
    transfer(request) {
      const { done } = agent.transfer(request);
      const released = done.then(
        () => {},
        () => {},
      );
      return { done, released };
    },
  };
}

function believingItself(agent: Agent): Agent {
  const forged: Notification[] = [];
  let wake: (() => void) | undefined;
  return {
    ...agent,
    async notify(remote, payload) {
      const said = decodeNotification(payload);
      await agent.notify(remote, payload);
      if (said.kind !== "extension" || said.message.type !== "push_withdraw") return;
      const { incarnation, generation } = said.message.kv_peer as Record<string, unknown>;
      const { request_id } = said.message;
      const message = { type: "push_ended", request_id, incarnation, generation, code: "KV_REQUEST_ABORTED" };
      forged.push({ from: remote, payload: own({ ...message, message: "forged" }) });
      wake?.();
    },
    async *notifications() {
      const real = agent.notifications();
      let next = real.next();
      for (;;) {
        const woken = new Promise<undefined>((resolve) => {
          wake = () => resolve(undefined);
        });
        const arrived = forged.length > 0 ? undefined : await Promise.race([next, woken]);
        yield* forged.splice(0);
        if (arrived === undefined) continue;
        if (arrived.done === true) return;
        next = real.next();
        yield arrived.value;
      }
    },
  };
}

function withoutGenerations(agent: Agent): Agent {
  let fresh = 1_000_000;
  return {
    ...agent,
    async *notifications() {
      for await (const { from, payload } of agent.notifications()) {
        fresh += 1;
        yield { from, payload: renumbered(payload, fresh) };
      }
    },
  };
}

/** A registration under a number that was never withdrawn. */
function renumbered(payload: Uint8Array, generation: number): Uint8Array {
  let said: KvNotification;
  try {
    said = decodeNotification(payload);
  } catch {
    return payload;
  }
  if (said.kind !== "push-registration") return payload;
  const { kv_peer } = said.registration as { kv_peer?: Record<string, unknown> };
  if (kv_peer === undefined) return payload;
  const registration = { ...said.registration, kv_peer: { ...kv_peer, generation } };
  return encodeNotification({ kind: "push-registration", registration });
}

function own(message: ExtensionMessage): Uint8Array {
  return encodeNotification({ kind: "extension", message });
}
