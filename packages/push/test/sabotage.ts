import type { Agent, Transport } from "@kv/interface";
import {
  decodeNotification,
  type ExtensionMessage,
  encodeNotification,
  type KvNotification,
} from "@kv/protocol";
import { ForgedNotifications } from "@kv/testing/forged-notifications";

/**
 * Breaks a rule of push from outside. The fault run must detect each of these; otherwise it proves
 * nothing. believe-itself: a consumer treats its own withdrawal as the producer's answer, so it
 * reuses blocks while a WRITE may still arrive. no-generations: a producer treats every
 * registration as a new one, so it serves one that arrives after its withdrawal. release-early:
 * memory counts as free as soon as a transfer has failed.
 */
export type PushSabotage = "believe-itself" | "no-generations" | "release-early";

export function sabotagedPush(sabotage: PushSabotage): (transport: Transport) => Transport {
  return (transport) => ({
    ...transport,
    async createAgent(options) {
      const agent = await transport.createAgent(options);
      if (sabotage === "believe-itself") return believingItself(agent);
      if (sabotage === "no-generations") return withoutGenerations(agent);
      return releasingEarly(agent);
    },
  });
}

function releasingEarly(agent: Agent): Agent {
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
  const inbox = new ForgedNotifications(agent);
  return {
    ...agent,
    notifications: () => inbox.all(),
    async notify(remote, payload) {
      const sent = decodeNotification(payload);
      await agent.notify(remote, payload);
      if (sent.kind !== "extension" || sent.message.type !== "push_withdraw") return;
      const { incarnation, generation, secret } = sent.message.kv_peer as Record<string, unknown>;
      const { request_id } = sent.message;
      const message = {
        type: "push_ended",
        request_id,
        incarnation,
        generation,
        secret,
        message: "forged",
      };
      inbox.add({ from: remote, payload: own({ ...message, code: "KV_REQUEST_ABORTED" }) });
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

/** Replaces the generation of a registration by one that was never withdrawn. */
function renumbered(payload: Uint8Array, generation: number): Uint8Array {
  let received: KvNotification;
  try {
    received = decodeNotification(payload);
  } catch {
    return payload;
  }
  if (received.kind !== "push-registration") return payload;
  const { kv_peer } = received.registration as { kv_peer?: Record<string, unknown> };
  if (kv_peer === undefined) return payload;
  const registration = { ...received.registration, kv_peer: { ...kv_peer, generation } };
  return encodeNotification({ kind: "push-registration", registration });
}

function own(message: ExtensionMessage): Uint8Array {
  return encodeNotification({ kind: "extension", message });
}
