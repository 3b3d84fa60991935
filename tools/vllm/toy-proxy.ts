import { startUpstream } from "@kv/testing/http/fake-upstream";
import { ask } from "./completion.js";

/**
 * Like published examples: P's `kv_transfer_params` go into the decode request, and every error is
 * a 500. A boundary case that it passes shows nothing.
 */
export function startToyProxy(prefillUrl: string, decodeUrl: string) {
  return startUpstream(async ({ path, json, response }) => {
    try {
      if (!["/v1/completions", "/v1/chat/completions"].includes(path)) {
        response.writeHead(404).end('{"detail":"Not Found"}');
        return;
      }
      const asked = { do_remote_decode: true, do_remote_prefill: false };
      const { stream_options: _, ...first } = json;
      if ("max_completion_tokens" in first) first.max_completion_tokens = 1;
      const prefill = await ask(prefillUrl + path, {
        ...first,
        kv_transfer_params: asked,
        stream: false,
        max_tokens: 1,
      });
      if (!prefill.ok) throw new Error(`prefill answered ${prefill.status}`);
      const { kv_transfer_params } = (await prefill.json()) as { kv_transfer_params?: unknown };
      const gone = new AbortController();
      response.once("close", () => gone.abort());
      const { signal } = gone;
      const decode = await ask(decodeUrl + path, { ...json, kv_transfer_params }, { signal });
      if (!decode.ok) throw new Error(`decode answered ${decode.status}`);
      response.writeHead(200, { "content-type": "application/json" });
      for await (const chunk of decode.body ?? []) response.write(chunk);
      response.end();
    } catch (error) {
      if (!response.headersSent) response.writeHead(500, { "content-type": "text/plain" });
      response.end(String(error));
    }
  });
}
