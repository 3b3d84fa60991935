import { once } from "node:events";
import { connect } from "node:net";
import { KvError, type KvErrorCode } from "@kv/interface";
import { ChildProcess } from "@kv/program";
import { z } from "zod";
import { childTask } from "../child/child-task.js";
import { type BenchRequest, channelOf, failedSchema, INITIATOR_LIMITS } from "./protocol.js";

/** The other side of a benchmark. It takes one request at a time. */
export interface RemoteTarget {
  readonly where: string;
  /**
   * Rejects with the target's error, `KV_SIDE_CHANNEL_CLOSED` when it has gone, or
   * `KV_WIRE_MALFORMED`.
   */
  ask<T>(request: BenchRequest, answer: z.ZodType<T>): Promise<T>;
  close(): Promise<void>;
}

const CONNECT_TIMEOUT_MS = 10_000;

/** Rejects with `KV_SIDE_CHANNEL_UNREACHABLE`. */
export async function connectTarget(host: string, port: number): Promise<RemoteTarget> {
  const where = `${host}:${port}`;
  const socket = connect({ host, port });
  try {
    await once(socket, "connect", { signal: AbortSignal.timeout(CONNECT_TIMEOUT_MS) });
  } catch (error) {
    socket.destroy();
    throw new KvError(
      "KV_SIDE_CHANNEL_UNREACHABLE",
      `no target answers at ${where}: ${(error as Error).message}`,
      { hint: `on that host: npx --no-install kv-nixl bench --listen ${where}`, cause: error },
    );
  }
  const channel = channelOf(socket, INITIATOR_LIMITS);
  return {
    where,
    async ask(request, answer) {
      channel.send(request);
      const { value: message, done } = await channel.messages.next();
      if (done === true) {
        throw new KvError(
          "KV_SIDE_CHANNEL_CLOSED",
          `the target at ${where} ended before it answered`,
        );
      }
      const reply = z.union([z.strictObject({ ok: answer }), failedSchema]).safeParse(message);
      if (!reply.success) {
        throw new KvError(
          "KV_WIRE_MALFORMED",
          `the target at ${where} sent an answer that this benchmark does not understand: ${reply.error.issues[0]?.message}`,
          { hint: "both hosts need the same version of @kv/nixl" },
        );
      }
      if ("ok" in reply.data) return reply.data.ok;
      const { code, message: text, hint } = reply.data.error;
      throw new KvError(code as KvErrorCode, `the target at ${where}: ${text}`, { hint });
    },
    async close() {
      channel.close();
    },
  };
}

/**
 * Starts a target in a second process, which ends with `close` or with this process. Rejects with
 * `KV_TRANSPORT_UNAVAILABLE`.
 */
export async function startTarget(
  maxBytes: number,
  env: Readonly<Record<string, string | undefined>> = process.env,
): Promise<RemoteTarget> {
  // NIXL's output must not mix with the report on stdout.
  const child = new ChildProcess({
    ...childTask("bench-target", String(maxBytes)),
    env,
    output: "stderr",
  });
  const { port } = await child.answer<{ port: number }>({
    what: "the second process of the benchmark did not start",
    code: "KV_TRANSPORT_UNAVAILABLE",
  });
  const target = await connectTarget("127.0.0.1", port).catch(async (error: unknown) => {
    await child.close();
    throw error;
  });
  return {
    ...target,
    where: "a second process",
    async close() {
      await target.close();
      await child.close();
    },
  };
}
