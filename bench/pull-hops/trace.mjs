// Loaded into the processes of a deployment: writes when each HTTP message of a request passes, one JSON line each, to the file KV_TRACE_FILE.
import { subscribe } from "node:diagnostics_channel";
import { appendFileSync } from "node:fs";
import { ServerResponse } from "node:http";

const file = process.env.KV_TRACE_FILE ?? "";
const role = process.argv.includes("proxy") ? "proxy" : /"role":"(\w+)"/.exec(process.argv.join(" "))?.[1];
const lines = [];
/** Milliseconds since 1970, as in spans. */
const nowMs = () => performance.timeOrigin + performance.now();
const note = (event, id) => {
  if (typeof id === "string" && id.includes("hops-")) lines.push({ atMs: nowMs(), role, event, id });
};
setInterval(() => {
  if (lines.length > 0)
    appendFileSync(
      file,
      `${lines
        .splice(0)
        .map((line) => JSON.stringify(line))
        .join("\n")}\n`,
    );
}, 500).unref();

subscribe("http.server.request.start", ({ request, response }) => {
  const id = request.headers["x-request-id"];
  note("request received", id);
  response.tracedId = id;
});
const { write, end } = ServerResponse.prototype;
ServerResponse.prototype.write = function (...args) {
  if (this.wroteFirst !== true) note("first byte sent", this.tracedId);
  this.wroteFirst = true;
  return write.apply(this, args);
};
ServerResponse.prototype.end = function (...args) {
  if (this.wroteFirst !== true) note("first byte sent", this.tracedId);
  this.wroteFirst = true;
  return end.apply(this, args);
};
const idOf = ({ headers }) => {
  const list = Array.isArray(headers) ? headers : String(headers).split(/\r\n|: /);
  const at = list.findIndex((name) => String(name).toLowerCase() === "x-request-id");
  return at < 0 ? undefined : String(list[at + 1]);
};
subscribe("undici:client:sendHeaders", ({ request, headers }) =>
  note(`request sent ${request.origin}`, idOf({ headers })),
);
subscribe("undici:request:headers", ({ request }) => note(`answer begins ${request.origin}`, idOf(request)));
