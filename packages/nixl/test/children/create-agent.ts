// Creates an agent with the backends of the environment, and prints the error and a variable that the addon sets for UCX as JSON.
import { KvError } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";

const transport = nixlTransport();
const error: unknown = await transport.createAgent().then(
  () => undefined,
  (caught: unknown) => caught,
);
const { code, message, hint } = KvError.is(error)
  ? error
  : { code: "none", message: String(error), hint: "" };
console.log(JSON.stringify({ code, message, hint, quota: process.env.UCX_CMA_TX_QUOTA }));
await transport.close();
