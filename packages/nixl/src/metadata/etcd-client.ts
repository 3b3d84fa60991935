import { type IncomingMessage, request as requestHttp } from "node:http";
import { request as requestHttps } from "node:https";
import { KvError } from "@kv/interface";
import { z } from "zod";

/** The revision of the store after an answer; etcd writes its 64-bit integers as text. */
const header = z.object({ revision: z.string().regex(/^\d{1,19}$/) });
const base64 = z.string();
const entry = z.object({ key: base64, value: base64.default("") });
const rangeSchema = z.object({ header, kvs: z.array(entry).default([]) });
const grantSchema = z.object({ ID: z.string().regex(/^\d{1,19}$/) });
const aliveSchema = z.object({ result: z.object({ TTL: z.string().default("0") }) });
const watchSchema = z.object({
  result: z.object({
    header,
    canceled: z.boolean().default(false),
    events: z
      .array(z.object({ type: z.enum(["PUT", "DELETE"]).default("PUT"), kv: entry }))
      .default([]),
  }),
});

/** A value and the revision of the store at which it was read. */
export interface EtcdValue {
  /** The bytes; undefined when there is no such key. */
  readonly value: Uint8Array | undefined;
  /** Revision of the store. */
  readonly revision: bigint;
}

/** A change of a watched key. */
export interface EtcdEvent {
  /** The key was written, or deleted: by a client, or because its lease has ended. */
  readonly type: "PUT" | "DELETE";
  /** The bytes that were written. */
  readonly value: Uint8Array;
}

/** Certificates for `https:` endpoints, as PEM. */
export interface EtcdTls {
  /** The authorities that sign etcd's certificate. @default those of Node */
  readonly ca?: string | undefined;
  /** This client's certificate, where etcd asks for one. */
  readonly cert?: string | undefined;
  /** The key of that certificate. */
  readonly key?: string | undefined;
}

const TIMEOUT_MS = 5000;
/** etcd takes values of 1.5 MiB by default. */
const MAX_ANSWER_BYTES = 64 << 20;

/**
 * The calls of etcd's v3 API that the exchange of metadata needs, by its JSON gateway (etcd 3.4 and
 * newer). Every call rejects with `KV_SIDE_CHANNEL_UNREACHABLE` when no endpoint answers within 5 s
 * or all refuse, and with `KV_WIRE_MALFORMED` for an answer that is not etcd's.
 */
export class EtcdClient {
  readonly #endpoints: readonly URL[];
  readonly #tls: EtcdTls;

  /** Endpoints in order of preference; each call begins with the first. */
  constructor(endpoints: readonly URL[], tls: EtcdTls = {}) {
    this.#endpoints = endpoints;
    this.#tls = tls;
  }

  /** Reads a key. */
  async get(key: string): Promise<EtcdValue> {
    const { header, kvs } = await this.#call(rangeSchema, "kv/range", { key: encoded(key) });
    const value = kvs[0] && new Uint8Array(Buffer.from(kvs[0].value, "base64"));
    return { value, revision: BigInt(header.revision) };
  }

  /** Writes a key, which ends with the lease. */
  async put(key: string, value: Uint8Array, lease: string): Promise<void> {
    await this.#call(z.object({}), "kv/put", {
      key: encoded(key),
      value: Buffer.from(value).toString("base64"),
      lease,
    });
  }

  /** Grants a lease and returns its id. */
  async grantLease(seconds: number): Promise<string> {
    return (await this.#call(grantSchema, "lease/grant", { TTL: String(seconds) })).ID;
  }

  /** Renews a lease; false when it has ended. */
  async keepLeaseAlive(lease: string): Promise<boolean> {
    return (await this.#call(aliveSchema, "lease/keepalive", { ID: lease })).result.TTL !== "0";
  }

  /** Ends a lease, and with it its keys. */
  async revokeLease(lease: string): Promise<void> {
    await this.#call(z.object({}), "lease/revoke", { ID: lease });
  }

  /**
   * Calls `onEvent` for each change of a key after `revision`, in order, until it returns false.
   * Resolves then, and when the signal is aborted; rejects when the connection ends or etcd cancels
   * the watch, as it does for a revision that it no longer has.
   */
  async watch(
    key: string,
    revision: bigint,
    onEvent: (event: EtcdEvent) => boolean,
    signal: AbortSignal,
  ): Promise<void> {
    const body = { create_request: { key: encoded(key), start_revision: String(revision + 1n) } };
    const answer = await this.#open("watch", body, signal).catch((error: unknown) => {
      if (signal.aborted) return undefined;
      throw error;
    });
    if (answer === undefined) return;
    try {
      for await (const line of linesOf(answer)) {
        const { canceled, events } = decode(watchSchema, line).result;
        if (canceled) break;
        for (const { type, kv } of events) {
          if (!onEvent({ type, value: new Uint8Array(Buffer.from(kv.value, "base64")) })) return;
        }
      }
    } catch (error) {
      if (!signal.aborted) {
        throw KvError.from(
          error,
          "KV_SIDE_CHANNEL_UNREACHABLE",
          `the watch of ${key} in etcd broke off`,
        );
      }
    } finally {
      answer.destroy();
    }
    if (!signal.aborted)
      throw new KvError("KV_SIDE_CHANNEL_UNREACHABLE", `etcd ended the watch of ${key}`);
  }

  async #call<T>(schema: z.ZodType<T>, path: string, body: object): Promise<T> {
    const answer = await this.#open(path, body, AbortSignal.timeout(TIMEOUT_MS));
    try {
      for await (const line of linesOf(answer)) return decode(schema, line);
    } catch (error) {
      throw KvError.from(
        error,
        "KV_SIDE_CHANNEL_UNREACHABLE",
        `the answer of etcd to ${path} broke off`,
      );
    } finally {
      answer.destroy();
    }
    throw new KvError("KV_WIRE_MALFORMED", `etcd answered ${path} with nothing`);
  }

  async #open(path: string, body: object, signal: AbortSignal): Promise<IncomingMessage> {
    const failures: string[] = [];
    for (const endpoint of this.#endpoints) {
      try {
        return await post(new URL(`/v3/${path}`, endpoint), body, signal, this.#tls);
      } catch (error) {
        failures.push(
          `${endpoint.origin}: ${error instanceof Error ? error.message : String(error)}`,
        );
      }
    }
    throw new KvError(
      "KV_SIDE_CHANNEL_UNREACHABLE",
      `etcd did not answer ${path}: ${failures.join("; ")}`,
      {
        hint: "check the endpoints, such as http://10.0.0.5:2379, and that etcd runs",
      },
    );
  }
}

/** An answer of etcd. Throws `KV_WIRE_MALFORMED`. */
function decode<T>(schema: z.ZodType<T>, line: string): T {
  try {
    return schema.parse(JSON.parse(line));
  } catch (cause) {
    throw new KvError(
      "KV_WIRE_MALFORMED",
      `etcd's answer is not as expected: ${line.slice(0, 200)}`,
      {
        cause,
      },
    );
  }
}

const encoded = (key: string): string => Buffer.from(key).toString("base64");

function post(url: URL, body: object, signal: AbortSignal, tls: EtcdTls): Promise<IncomingMessage> {
  const secure = url.protocol === "https:";
  const request = secure ? requestHttps : requestHttp;
  return new Promise((resolve, reject) => {
    let answered = false;
    const headers = { "content-type": "application/json" };
    const sent = request(
      url,
      { method: "POST", signal, headers, ...(secure ? tls : {}) },
      (answer) => {
        answered = true;
        if (answer.statusCode === 200) {
          resolve(answer);
          return;
        }
        answer.resume();
        reject(new Error(`status ${answer.statusCode}`));
      },
    );
    // A watch is silent for as long as nothing changes, so only its beginning has a deadline.
    sent.setTimeout(TIMEOUT_MS, () => {
      if (!answered) sent.destroy(new Error("timeout"));
    });
    sent.on("error", reject);
    sent.end(JSON.stringify(body));
  });
}

/**
 * The lines of an answer; etcd's gateway writes a JSON value a line. Throws
 * `KV_WIRE_LIMIT_EXCEEDED`.
 */
async function* linesOf(answer: IncomingMessage): AsyncGenerator<string> {
  let parts: Buffer[] = [];
  let bytes = 0;
  for await (const chunk of answer) {
    let rest = chunk as Buffer;
    for (let end = rest.indexOf(10); end >= 0; end = rest.indexOf(10)) {
      yield Buffer.concat([...parts, rest.subarray(0, end)]).toString("utf8");
      parts = [];
      bytes = 0;
      rest = rest.subarray(end + 1);
    }
    parts.push(rest);
    bytes += rest.length;
    if (bytes > MAX_ANSWER_BYTES) {
      throw new KvError(
        "KV_WIRE_LIMIT_EXCEEDED",
        `an answer of etcd exceeds ${MAX_ANSWER_BYTES} bytes`,
      );
    }
  }
  if (bytes > 0) yield Buffer.concat(parts).toString("utf8");
}
