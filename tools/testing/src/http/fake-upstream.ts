import { createServer, type IncomingHttpHeaders, type ServerResponse } from "node:http";
import { listening } from "./listening.js";

export interface Seen {
  readonly method: string;
  readonly path: string;
  readonly headers: IncomingHttpHeaders;
  readonly body: string;
  readonly json: Record<string, unknown>;
  readonly response: ServerResponse;
  readonly dropped: Promise<void>;
}

export type Answer = (seen: Seen) => void | Promise<void>;

export type FakeUpstream = Awaited<ReturnType<typeof startUpstream>>;

/** A real HTTP server on the loopback that keeps the requests. */
export async function startUpstream(answer: Answer, port = 0) {
  const seen: Seen[] = [];
  const waiting = new Map<number, (seen: Seen) => void>();
  const server = createServer((request, response) => {
    const dropped = new Promise<void>((resolve) => {
      response.once("close", () => {
        if (!response.writableFinished) resolve();
      });
    });
    const chunks: Buffer[] = [];
    request.on("data", (chunk: Buffer) => chunks.push(chunk));
    request.on("end", () => {
      const body = Buffer.concat(chunks).toString("utf8");
      const { method = "", url = "", headers } = request;
      const json = body === "" ? {} : (JSON.parse(body) as Record<string, unknown>);
      const one: Seen = { method, path: url, headers, body, json, response, dropped };
      seen.push(one);
      waiting.get(seen.length - 1)?.(one);
      void answer(one);
    });
  });
  return {
    url: `http://127.0.0.1:${await listening(server, port)}`,
    seen: seen as readonly Seen[],
    request: async (index: number): Promise<Seen> =>
      seen[index] ?? new Promise((resolve) => waiting.set(index, resolve)),
    async close(): Promise<void> {
      const closed = new Promise((resolve) => server.close(resolve));
      server.closeAllConnections();
      await closed;
    },
  };
}

export async function deadUrl(): Promise<string> {
  const upstream = await startUpstream(() => {});
  await upstream.close();
  return upstream.url;
}

export function sendJson(response: ServerResponse, value: unknown, status = 200): void {
  const body = JSON.stringify(value);
  response.writeHead(status, {
    "content-type": "application/json",
    "content-length": Buffer.byteLength(body),
  });
  response.end(body);
}

/** The last integer is one that a double cannot hold. */
export const KV_PARAMS_TEXT =
  '{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_engine_id":"e",' +
  '"remote_request_id":"r-0-ab","remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"generation":9007199254740993}';

export const prefillOk: Answer = ({ response, path }) => {
  if (path === "/v1/models") return sendJson(response, MODELS);
  response.writeHead(200, { "content-type": "application/json" });
  response.end(`{"id":"cmpl-1","choices":[{"text":"x"}],"kv_transfer_params":${KV_PARAMS_TEXT}}`);
};

const MODELS = { object: "list", data: [{ id: "m", object: "model" }] };
export const COMPLETION = {
  id: "cmpl-1",
  object: "text_completion",
  choices: [{ index: 0, text: "hello" }],
};

export const STREAM = `data: ${JSON.stringify(COMPLETION)}\n\ndata: [DONE]\n\n`;

export function sendStream(response: ServerResponse, text: string): void {
  response.writeHead(200, { "content-type": "text/event-stream" });
  response.end(text);
}

export const decodeOk: Answer = ({ response, path }) =>
  sendJson(response, path === "/v1/models" ? MODELS : COMPLETION);
