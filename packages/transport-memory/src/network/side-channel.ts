import {
  KvError,
  type SideChannel,
  type SideChannelReply,
  type SideChannelRequest,
  type Timer,
} from "@kv/interface";
import { deferred } from "../deferred.js";
import { delayOf } from "./fault-plan.js";
import type { MemoryHost } from "./host.js";
import { fabricOf, type MemoryNetwork, type SideChannelBinding } from "./network.js";

/** Options of `memorySideChannel`. */
export interface MemorySideChannelOptions {
  readonly network: MemoryNetwork;
  /** Simulated process of the side channel. @default "localhost" */
  readonly host?: string | MemoryHost | undefined;
}

const OWN_NAMES = ["localhost", "127.0.0.1", "::1", "0.0.0.0", "::", "*"];
const FIRST_FREE_PORT = 32_768;
const LAST_PORT = 65_535;

/**
 * Creates a side channel between a network's hosts; "localhost" is the own one. Listeners have
 * `Symbol.asyncDispose`. `withEncryption` compares keys, but encrypts nothing.
 *
 * @throws `KV_CONFIG_INVALID` for a network that `memoryNetwork` did not create.
 */
export function memorySideChannel(
  options: MemorySideChannelOptions,
): SideChannel & AsyncDisposable {
  const fabric = fabricOf(options.network);
  const self =
    typeof options.host === "object" ? options.host : fabric.host(options.host ?? "localhost");
  const own = new Set<string>();
  const pending = new Set<(error: KvError) => void>();
  let closed = false;

  const resolveHost = (host: string): string => (OWN_NAMES.includes(host) ? self.name : host);
  const forgetKill = self.onKill(() => {
    closed = true;
    for (const key of own) fabric.bindings.delete(key);
    fabric.requestsInFlight -= pending.size;
    pending.clear();
  });

  function assertOpen(action: string): void {
    if (closed || !self.alive)
      throw new KvError(
        "KV_SIDE_CHANNEL_CLOSED",
        `${action}: the side channel of host ${self.name} is closed`,
      );
  }

  function freePort(): number {
    for (let port = FIRST_FREE_PORT; port <= LAST_PORT; port++) {
      if (!fabric.bindings.has(`${self.name}:${port}`)) return port;
    }
    throw bindFailed(self.name, 0, "no port is free");
  }

  function send(options: SideChannelRequest, keys: Keys): Promise<SideChannelReply> {
    const { port, timeoutMs, signal } = options;
    const to = resolveHost(options.host);
    const subject = `request to ${options.host}:${port}`;
    const frames = options.frames.map((frame) => frame.slice());
    const { promise, resolve, reject } = deferred<SideChannelReply>();
    const timers = new Set<Timer>();
    const sentAtMs = self.clock.now();
    let ended = false;

    function end(): boolean {
      if (ended) return false;
      ended = true;
      for (const timer of timers) timer.cancel();
      signal?.removeEventListener("abort", onAbort);
      if (pending.delete(fail)) fabric.requestsInFlight -= 1;
      return true;
    }
    function fail(error: KvError): void {
      if (end()) reject(error);
    }
    function onAbort(): void {
      fail(
        new KvError("KV_REQUEST_ABORTED", `${subject} was aborted by its signal`, {
          cause: signal?.reason,
        }),
      );
    }
    function later(delayMs: number, run: () => void): void {
      const timer = self.clock.setTimer(
        () => {
          timers.delete(timer);
          run();
        },
        delayMs,
        { ref: true },
      );
      timers.add(timer);
    }
    const unreachable = (reason: string): void =>
      fail(
        new KvError("KV_SIDE_CHANNEL_UNREACHABLE", `${subject} from host ${self.name}: ${reason}`),
      );

    pending.add(fail);
    fabric.requestsInFlight += 1;
    if (signal?.aborted) {
      onAbort();
      return promise;
    }
    signal?.addEventListener("abort", onAbort);
    later(timeoutMs, () =>
      fail(new KvError("KV_SIDE_CHANNEL_TIMEOUT", `${subject}: no reply within ${timeoutMs} ms`)),
    );

    const rule = fabric.faults.decide({
      operation: "REQUEST",
      from: self.name,
      to,
      lengthBytes: frames.reduce((sum, frame) => sum + frame.length, 0),
    });
    if (rule?.fault === "disconnect") fabric.disconnect(self.name, to, rule);
    if (rule?.fault === "drop") return promise;

    later(fabric.drawLatencyMs() + delayOf(rule, "delay"), () => {
      const binding = fabric.bindings.get(`${to}:${port}`);
      if (rule?.fault === "fail") unreachable("an injected fault");
      else if (fabric.isCut(self.name, to)) unreachable("the hosts are disconnected");
      else if (binding === undefined)
        unreachable(fabric.hostIsAlive(to) ? "the port has no listener" : "the host is not alive");
      else {
        const refused = refusalOf(keys, binding.keys);
        if (refused === undefined) void exchange(binding);
        else {
          const hint = "set handshake_key_file to the same key on both sides, or on neither";
          fabric.log.warn("memory-side-channel-refused", { host: to, port, reason: refused, hint });
          fail(
            new KvError("KV_HANDSHAKE_UNTRUSTED", `${subject} is refused: ${refused}`, { hint }),
          );
        }
      }
    });

    async function exchange(binding: SideChannelBinding): Promise<void> {
      let reply: readonly Uint8Array[] | undefined;
      try {
        reply = await binding.answer(frames);
      } catch (error) {
        // As with a ZMQ ROUTER, the requester times out.
        fabric.log.warn("memory-side-channel-answer-failed", { host: to, port, error });
      }
      if (reply === undefined || ended || !binding.host.alive) return;
      const copied = reply.map((frame) =>
        rule?.fault === "garbage" ? noise(frame.length) : frame.slice(),
      );
      later(fabric.drawLatencyMs(), () => {
        if (fabric.isCut(self.name, to)) return;
        if (end()) resolve({ frames: copied, sentAtMs, receivedAtMs: self.clock.now() });
      });
    }
    return promise;
  }

  const noise = (lengthBytes: number): Uint8Array =>
    Uint8Array.from({ length: lengthBytes }, () => fabric.random.integer(256));

  const side = (keys: Keys): SideChannel & AsyncDisposable => ({
    withEncryption: side,
    async listen({ host, port, answer }) {
      assertOpen("listen");
      if (resolveHost(host) !== self.name)
        throw bindFailed(host, port, `host ${self.name} has no such address`);
      if (!Number.isInteger(port) || port < 0 || port > LAST_PORT)
        throw bindFailed(host, port, "invalid port");
      const bound = port === 0 ? freePort() : port;
      const key = `${self.name}:${bound}`;
      if (fabric.bindings.has(key)) throw bindFailed(host, bound, "the port is in use");
      fabric.bindings.set(key, { host: self, keys, answer });
      own.add(key);
      const close = async (): Promise<void> => {
        if (own.delete(key)) fabric.bindings.delete(key);
      };
      return { host, port: bound, close, [Symbol.asyncDispose]: close };
    },
    async request(requested) {
      assertOpen(`request to ${requested.host}:${requested.port}`);
      return await send(requested, keys);
    },
    close,
    [Symbol.asyncDispose]: close,
  });

  async function close(): Promise<void> {
    if (closed) return;
    closed = true;
    forgetKill();
    for (const key of own) fabric.bindings.delete(key);
    own.clear();
    for (const fail of [...pending]) {
      fail(
        new KvError("KV_SIDE_CHANNEL_CLOSED", `the side channel of host ${self.name} was closed`),
      );
    }
  }

  return side(undefined);
}

type Keys = (() => readonly Uint8Array[]) | undefined;

/** Undefined when both accept each other. */
function refusalOf(asks: Keys, answers: Keys): string | undefined {
  const key = asks?.()[0];
  if (asks === undefined && answers === undefined) return undefined;
  if (answers === undefined) return "the listener has no key, and the request has one";
  if (asks === undefined) return "the listener has a key, and the request has none";
  const isKnown = answers().some(
    (each) => each.length === key?.length && each.every((byte, at) => byte === key[at]),
  );
  return isKnown ? undefined : "the listener has another key than the request";
}

function bindFailed(host: string, port: number, reason: string): KvError {
  return new KvError("KV_SIDE_CHANNEL_BIND_FAILED", `cannot listen on ${host}:${port}: ${reason}`, {
    hint: "choose another host or port (VLLM_NIXL_SIDE_CHANNEL_HOST, VLLM_NIXL_SIDE_CHANNEL_PORT), or port 0 for a free one",
  });
}
