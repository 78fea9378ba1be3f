// The package in the browser: CPython as WebAssembly (Pyodide), in a thread of its own.
//
// Messages in: {files: name -> bytes}, then {id, text}: a question as JSON. Messages out: {loaded: share},
// {ready: true}, {id, text} or {id, error}; {failed: message} where it cannot be started.

const counted = {done: 0, all: 1};

// Bytes are counted as they come. The other files are loaded by Pyodide itself, through this fetch.
const plain = self.fetch.bind(self);
self.fetch = async (...asked) => {
  const answer = await plain(...asked);
  if (!answer.ok || !answer.body) return answer;
  const counting = new TransformStream({transform(part, out) {
    counted.done += part.byteLength;
    self.postMessage({loaded: Math.min(1, counted.done / counted.all)});
    out.enqueue(part);
  }});
  return new Response(answer.body.pipeThrough(counting), {headers: answer.headers});
};

const BEGIN = `
import os, sys
sys.path.insert(0, "/site")
sys.executable = "python3"
os.environ["HF_HUB_OFFLINE"] = "1"
os.makedirs("/recipe", exist_ok=True)
os.chdir("/recipe")
from launcher.commands.plan_page import answer
`;

let answer;

async function begin(files) {
  counted.all = Object.values(files).reduce((sum, bytes) => sum + bytes, 0);
  const {loadPyodide} = await import('./pyodide/pyodide.mjs');
  const python = await loadPyodide({indexURL: new URL('./pyodide/', self.location.href).href});
  const packed = await self.fetch('./effilaunch.zip');
  if (!packed.ok) throw new Error(`effilaunch.zip: HTTP ${packed.status}`);
  python.unpackArchive(await packed.arrayBuffer(), 'zip', {extractDir: '/site'});
  await python.runPythonAsync(BEGIN);
  answer = python.globals.get('answer');
}

self.onmessage = async ({data}) => {
  if (data.files) {
    try {
      await begin(data.files);
      self.postMessage({ready: true});
    } catch (error) {
      self.postMessage({failed: String(error.message).split('\n').filter(line => line.trim()).pop()});
    }
    return;
  }
  try {
    self.postMessage({id: data.id, text: answer(data.text)});
  } catch (error) {
    self.postMessage({id: data.id, error: String(error.message).split('\n').filter(line => line.trim()).pop()});
  }
};
