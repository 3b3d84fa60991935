export { type BackendChoice, chooseBackends } from "./backend-choice.js";
export { type Installed, type InstallOptions, installNixl } from "./install.js";
export { type Environment, type FindLibraryOptions, findLibrary } from "./library.js";
export { type NixlTransportOptions, nixlTransport } from "./transport.js";
export type { Cuda } from "./wheels.js";
