import { connect } from "node:net";
import { READY_OF_REQ, ZMTP_GREETING } from "./zmtp-peer.js";

// Opens connections and keeps them: `PORT COUNT greeted` completes the handshake on each,
// `PORT COUNT silent` sends half a greeting.

const [port, count, kind] = process.argv.slice(2);
const bytes =
  kind === "greeted" ? Buffer.concat([ZMTP_GREETING, READY_OF_REQ]) : ZMTP_GREETING.subarray(0, 20);
let ended = 0;
let begun = 0;
const open = () =>
  new Promise<void>((resolve) => {
    begun += 1;
    const socket = connect(Number(port), "127.0.0.1", () => {
      socket.write(bytes);
      resolve();
    });
    socket.on("error", () => {}).resume();
    socket.on("close", () => {
      ended += 1;
      resolve();
    });
  });
await Promise.all(
  Array.from({ length: 100 }, async () => {
    while (begun < Number(count)) await open();
  }),
);
process.send?.({ begun, ended });
setInterval(() => process.send?.({ begun, ended }), 500);
process.on("disconnect", () => process.exit());
