import { createServer, type Server } from "node:http";
import type { AddressInfo } from "node:net";

/**
 * A minimal proxy for P and D, like published examples. It sends one prefill request with
 * `max_tokens` 1 and copies the `kv_transfer_params` of the answer to the decode request. It
 * returns the body of the decode answer with status 200. Every error becomes a 500. It is the
 * negative control of the boundary cases: a case that this proxy passes shows nothing about the
 * boundary.
 */
export async function startToyProxy(prefillUrl: string, decodeUrl: string) {
  const server = createServer(async (request, response) => {
    const path = request.url ?? "";
    try {
      if (!["/v1/completions", "/v1/chat/completions"].includes(path)) {
        response.writeHead(404).end('{"detail":"Not Found"}');
        return;
      }
      const chunks: Buffer[] = [];
      for await (const chunk of request) chunks.push(chunk as Buffer);
      const given = JSON.parse(Buffer.concat(chunks).toString()) as Record<string, unknown>;
      const asked = { do_remote_decode: true, do_remote_prefill: false };
      const first: Record<string, unknown> = {
        ...given,
        kv_transfer_params: asked,
        stream: false,
        max_tokens: 1,
      };
      if ("max_completion_tokens" in first) first.max_completion_tokens = 1;
      delete first.stream_options;
      const headers = { "content-type": "application/json", connection: "close" };
      const prefill = await fetch(prefillUrl + path, {
        method: "POST",
        headers,
        body: JSON.stringify(first),
      });
      if (!prefill.ok) throw new Error(`prefill answered ${prefill.status}`);
      const { kv_transfer_params } = (await prefill.json()) as { kv_transfer_params?: unknown };
      const second = JSON.stringify({ ...given, kv_transfer_params });
      const gone = new AbortController();
      response.once("close", () => gone.abort());
      const decode = await fetch(decodeUrl + path, {
        method: "POST",
        headers,
        body: second,
        signal: gone.signal,
      });
      if (!decode.ok) throw new Error(`decode answered ${decode.status}`);
      response.writeHead(200, { "content-type": "application/json" });
      for await (const chunk of decode.body ?? []) response.write(chunk);
      response.end();
    } catch (error) {
      if (!response.headersSent) response.writeHead(500, { "content-type": "text/plain" });
      response.end(String(error));
    }
  });
  return listening(server);
}

/** Listens on a free port of this host, and resolves with the URL. */
export async function listening(server: Server) {
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    async close() {
      const closed = new Promise((resolve) => server.close(resolve));
      server.closeAllConnections();
      await closed;
    },
  };
}
