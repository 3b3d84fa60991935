export * from "./zmq-side-channel.js";
