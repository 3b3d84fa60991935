import { startUpstream } from "./fake-upstream.js";

/**
 * `none`: a plain pull proxy. `drops-params`: D does not get P's `kv_transfer_params`
 * (kserve/kserve#5987). `prefill-twice`: D gets the second answer of P.
 */
export type FrontFault = "none" | "decode-alone" | "drops-params" | "prefill-twice";

export function startFaultyFront(
  servers: { readonly prefill: string; readonly decode: string },
  fault: FrontFault,
) {
  return startUpstream(async ({ method, path, json, response }) => {
    const send = async (server: string, body?: object) => {
      const answer = await fetch(server + path, {
        method,
        headers: { "content-type": "application/json", connection: "close" },
        body: body === undefined ? null : JSON.stringify(body),
      });
      return { status: answer.status, text: await answer.text() };
    };
    const prefill = async (): Promise<object> => {
      const asked = { ...json, max_tokens: 1, kv_transfer_params: { do_remote_decode: true } };
      const { kv_transfer_params = {} } = JSON.parse((await send(servers.prefill, asked)).text) as {
        kv_transfer_params?: object;
      };
      return fault === "drops-params" ? {} : { kv_transfer_params };
    };
    let params = {};
    if (method === "POST" && fault !== "decode-alone") {
      if (fault === "prefill-twice") await prefill();
      params = await prefill();
    }
    const { status, text } = await send(
      servers.decode,
      method === "POST" ? { ...json, ...params } : undefined,
    );
    response.writeHead(status, { "content-type": "application/json" }).end(text);
  });
}
