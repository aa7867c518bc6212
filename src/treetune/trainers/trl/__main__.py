from treetune.trainers.trl.run import main

main()
