import { request as httpRequest, type IncomingMessage } from "node:http";
import { request as httpsRequest, type RequestOptions } from "node:https";
import type { KubeConfig } from "@kubernetes/client-node";
import { invalidConfig } from "../settings/invalid-config.js";

/**
 * The API server and its user. Without a file: `KUBECONFIG`, `~/.kube/config`, or the service
 * account of the pod.
 */
export interface KubernetesAccess {
  readonly kubeconfig?: string | undefined;
  /** A context of that file. @default its current one */
  readonly context?: string | undefined;
}

/** 500 pods with long specifications have about 10 MB. */
const MAX_ANSWER_BYTES = 64 * 1024 * 1024;
/** etcd keeps no objects above 1.5 MB. */
const MAX_EVENT_BYTES = 4 * 1024 * 1024;
const ANSWER_TIMEOUT_MS = 30_000;

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/**
 * Sends GETs to the API server. `@kubernetes/client-node` finds it and authenticates: kubeconfig
 * files, service accounts, client certificates, exec plugins. Its informer (1.4) is not used: it
 * keeps whole objects (20 times the memory), reads lines of any length, asks for no bookmarks,
 * hides errors of a watch, and ends the process at an event without an object.
 */
export class ApiConnection {
  #config: Promise<KubeConfig> | undefined;

  constructor(
    private readonly access: KubernetesAccess,
    private readonly loadClient = () => import("@kubernetes/client-node"),
  ) {}

  /** @throws `KV_CONFIG_INVALID`. */
  async namespace(): Promise<string> {
    const config = await this.#loaded();
    return config.getContextObject(config.getCurrentContext())?.namespace ?? "default";
  }

  /** @throws `ApiError`, errors of the connection, `KV_CONFIG_INVALID` for unreadable access. */
  async get(
    path: string,
    query: Readonly<Record<string, string>>,
    signal: AbortSignal,
  ): Promise<unknown> {
    const answer = await this.#open(path, query, ANSWER_TIMEOUT_MS, signal);
    return JSON.parse(await readAll(answer));
  }

  /**
   * Resolves when the server ends the watch.
   *
   * @throws as `get`; also when nothing comes for `idleMs`.
   */
  async watch(
    path: string,
    query: Readonly<Record<string, string>>,
    options: { readonly idleMs: number; readonly signal: AbortSignal; readonly onOpen: () => void },
    onEvent: (event: unknown) => void,
  ): Promise<void> {
    const answer = await this.#open(
      path,
      { ...query, watch: "true" },
      options.idleMs,
      options.signal,
    );
    options.onOpen();
    let pending: Buffer = Buffer.alloc(0);
    for await (const chunk of answer as AsyncIterable<Buffer>) {
      pending = pending.length === 0 ? chunk : Buffer.concat([pending, chunk]);
      let from = 0;
      for (let end = pending.indexOf(10); end !== -1; end = pending.indexOf(10, from)) {
        if (end > from) onEvent(JSON.parse(pending.toString("utf8", from, end)));
        from = end + 1;
      }
      pending = pending.subarray(from);
      if (pending.length > MAX_EVENT_BYTES)
        throw new Error(`an event has more than ${MAX_EVENT_BYTES} bytes`);
    }
  }

  async #open(
    path: string,
    query: Readonly<Record<string, string>>,
    idleMs: number,
    signal: AbortSignal,
  ): Promise<IncomingMessage> {
    const config = await this.#loaded();
    const server = config.getCurrentCluster()?.server ?? "";
    const url = new URL(server.replace(/\/$/, "") + path);
    for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
    const options: RequestOptions = { headers: { accept: "application/json" }, signal };
    await config.applyToHTTPSOptions(options);
    const send = url.protocol === "http:" ? httpRequest : httpsRequest;
    const answer = await new Promise<IncomingMessage>((resolve, reject) => {
      const request = send(url, options, resolve).on("error", reject).end();
      request.setTimeout(idleMs, () =>
        request.destroy(new Error(`the API server sent nothing for ${idleMs} ms`)),
      );
    });
    const { statusCode: status = 0 } = answer;
    if (status === 200) return answer;
    // Makes the next request read a new token.
    if (status === 401) this.#config = undefined;
    const reason = await reasonIn(answer);
    throw new ApiError(status, `the API server answered ${status} to GET ${url.pathname}${reason}`);
  }

  #loaded(): Promise<KubeConfig> {
    this.#config ??= this.#load().catch((error: unknown) => {
      this.#config = undefined;
      throw error;
    });
    return this.#config;
  }

  async #load(): Promise<KubeConfig> {
    const { kubeconfig, context } = this.access;
    const client = await this.loadClient().catch((cause: unknown) => {
      throw invalidConfig(
        "discovery in Kubernetes needs the package @kubernetes/client-node, which cannot be loaded",
        "npm install @kubernetes/client-node@1 (version 2 needs Node 22.19)",
        cause,
      );
    });
    const config = new client.KubeConfig();
    const file = `the kubeconfig ${kubeconfig ?? ""}`;
    try {
      if (kubeconfig === undefined) config.loadFromDefault();
      else config.loadFromFile(kubeconfig);
      if (context !== undefined) config.setCurrentContext(context);
    } catch (cause) {
      throw invalidConfig(`${file} cannot be read: ${cause}`, undefined, cause);
    }
    if (config.getCurrentCluster() !== null) return config;
    throw invalidConfig(
      `${file} has no cluster for the context ${config.getCurrentContext()}`,
      "name a context of the file; in a pod, mount the token of its service account",
    );
  }
}

async function readAll(answer: IncomingMessage): Promise<string> {
  const chunks: Buffer[] = [];
  let length = 0;
  for await (const chunk of answer as AsyncIterable<Buffer>) {
    length += chunk.length;
    if (length > MAX_ANSWER_BYTES)
      throw new Error(`the API server's answer has more than ${MAX_ANSWER_BYTES} bytes`);
    chunks.push(chunk);
  }
  return Buffer.concat(chunks).toString();
}

async function reasonIn(answer: IncomingMessage): Promise<string> {
  try {
    const { message } = JSON.parse(await readAll(answer)) as { message?: unknown };
    return typeof message === "string" ? `: ${message.slice(0, 500)}` : "";
  } catch {
    return "";
  }
}
