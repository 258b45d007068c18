#!/bin/sh
# Runs in a container of which systemd is the first process, see test_services.py: installs the units of a deployment as
# their first lines say, trains, kills the programs, trains again, and stops them. Arguments: the folder of the programs,
# the checkout.
set -eux
exec >/results/log 2>&1
finish() {
    code=$?
    journalctl --no-pager --boot --unit "hyperfl-*" >/results/journal 2>&1 || true
    echo "$code" >/results/code
    systemctl poweroff
}
trap finish EXIT
programs=$1 checkout=$2
useradd --create-home clinic
useradd --system hyperfl
as_clinic() {
    su clinic -c "cd && HOME=/home/clinic PATH=$programs:\$PATH PYTHONPATH=$checkout OMP_NUM_THREADS=1 $1"
}
online() {
    as_clinic "hyperfl deploy status fl --json" | tr -d ' \n' | grep -o '"state":"connected"' | wc -l
}
until_online() {
    for _ in $(seq 120); do
        [ "$(online)" -eq 2 ] && return
        sleep 1
    done
    return 1
}
as_clinic "hyperfl deploy init fl --nodes 2 --host localhost --port 8443"
mkdir /srv/hyperfl
for number in 0 1; do
    node=/srv/hyperfl/node-$number
    mv "/home/clinic/fl/nodes/node-$number" "$node"
    chown -R hyperfl: "$node"
    echo "export PYTHONPATH=$checkout OMP_NUM_THREADS=1" >>"$node/environment"
    echo "HYPERFL_BIN=$programs" >>"$node/environment"
    cp "$node/hyperfl-node.service" "/etc/systemd/system/hyperfl-node-$number.service"
done
echo "export PYTHONPATH=$checkout" >>/home/clinic/fl/server/environment
cp /home/clinic/fl/server/hyperfl-superlink.service /etc/systemd/system/
systemctl daemon-reload
systemctl enable --now hyperfl-superlink
for _ in $(seq 60); do
    as_clinic "hyperfl deploy register fl" && break
    sleep 1
done
systemctl enable --now hyperfl-node-0 hyperfl-node-1
until_online
as_clinic "hyperfl deploy check fl"
as_clinic "hyperfl run --deployment fl --method fedavg --num-clients 2 --num-rounds 2 --output first"

# A program that is killed is started again, and the next run has both nodes.
for unit in hyperfl-node-0 hyperfl-superlink; do
    killed=$(systemctl show --property MainPID --value "$unit")
    systemctl kill --signal KILL "$unit"
    for _ in $(seq 60); do
        now=$(systemctl show --property MainPID --value "$unit")
        if [ "$now" != 0 ] && [ "$now" != "$killed" ]; then break; fi
        sleep 1
    done
    [ "$now" != "$killed" ]
done
until_online
as_clinic "hyperfl run --deployment fl --method fedavg --num-clients 2 --num-rounds 1 --output /tmp/second"
for unit in hyperfl-superlink hyperfl-node-0 hyperfl-node-1; do
    systemctl show --property Id,ActiveState,NRestarts,Result,User "$unit" | tr '\n' ' ' >>/results/active
    echo >>/results/active
done
systemctl stop hyperfl-node-0 hyperfl-node-1 hyperfl-superlink
for unit in hyperfl-superlink hyperfl-node-0 hyperfl-node-1; do
    echo "$unit $(systemctl is-active "$unit" || true)" >>/results/stopped
done
cp /home/clinic/first/summary.json /results/first.json
cp /tmp/second/summary.json /results/second.json # written by the service, which has no /tmp of its own
